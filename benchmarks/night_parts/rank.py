"""Trains as `moe-rl train` does, in a rank whose main thread stops at SIGUSR2. Its other threads go on."""

import argparse
import signal
import sys
import time

from moe_rl.commands import train


def _stops(*_: object) -> None:
    time.sleep(1e9)


# megatron-core may start helper processes that import this file again.
if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _stops)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    sys.exit(train.run(parser.parse_args()))
