"""Runs a rank of the proof on the pretend device: arguments as `moe_rl.proof.rank`."""

import warnings

from tests.support import pretend_cuda

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    with pretend_cuda.installed() as device:
        pretend_cuda.fit_megatron()
        from moe_rl.proof import rank

        rank.main()
        assert not device.faults, device.faults
