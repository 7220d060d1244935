"""Trains as `moe-rl train` does, in a rank whose main thread stops in the first layer that it begins after SIGUSR2. Its
other threads go on."""

import argparse
import signal
import sys
import time

from moe_rl.commands import train
from moe_rl.whereabouts import Whereabouts


def _stop(*_: object) -> None:
    Whereabouts.begin_layer = lambda self, number: time.sleep(1e9)  # type: ignore[method-assign]


# megatron-core may start helper processes that import this file again.
if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _stop)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    sys.exit(train.run(parser.parse_args()))
