"""Runs a rank of `moe-rl train` on the pretend device: arguments as `tools/train_moe_rl.py`. Engines use the CPU."""

import argparse
import sys
import warnings

from tests.support import pretend_cuda

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    with pretend_cuda.installed() as device:
        pretend_cuda.fit_megatron()
        from moe_rl.commands import train

        parser = argparse.ArgumentParser()
        train.add_arguments(parser)
        status = train.run(parser.parse_args())
        assert not device.faults, device.faults
    sys.exit(status)
