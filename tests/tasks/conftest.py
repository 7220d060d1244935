from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_rl.config.reward_kinds import FunctionReward
from moe_rl.tasks.verifiers import VerifierPool
from tests.support.processes import alive, state, wait_until


def group_members(group: int) -> list[int]:
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and alive(int(folder.name)):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group:
                members.append(int(folder.name))
    return members


@pytest.fixture
def helpers():
    """Process helpers for tests: alive(pid), state(pid), group_members(pgid), wait_until(condition)."""
    return SimpleNamespace(alive=alive, state=state, group_members=group_members, wait_until=wait_until)


@pytest.fixture
def make_pool(monkeypatch):
    """Opens pools over functions of bad_rewards.py (bare names) or by dotted path, closed at the end.

    batch: the batch size of a function by name. kinds: further rewards of other kinds.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pools = []

    def make(*functions: str, timeout=30.0, workers=1, weights=None, batch=None, kinds=None, **more) -> VerifierPool:
        rewards = {
            path.rpartition(".")[2]: FunctionReward(
                function=path if "." in path else f"bad_rewards.{path}",
                weight=(weights or {}).get(path, 1.0),
                batch_size=(batch or {}).get(path),
            )
            for path in functions
        } | (kinds or {})
        pool = VerifierPool(rewards, timeout_seconds=timeout, workers=workers, **more)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
