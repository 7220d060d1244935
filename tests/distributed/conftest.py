"""A tiny random model, its independent reference, and ranks that run the cases of the proof and other jobs on it."""

import subprocess

import pytest

from moe_rl.proof import matrix
from moe_rl.proof.batch import make_checkpoint
from moe_rl.proof.cases import Case
from tests.distributed.ranks import ORIGIN, World
from tests.support import planted
from tests.support.independent import clear_checkpoint


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items):
    """A test with a case that is not in its module's USUAL is long, and with four ranks nightly."""
    for item in items:
        usual = getattr(item.module, "USUAL", None)
        given = item.callspec.params if usual is not None and hasattr(item, "callspec") else {}
        if any(given[name] not in usual for name in given.keys() & {"case", "plain", "layout", "name"}):
            item.add_marker(pytest.mark.long)
            if any(isinstance(case, Case) and case.ranks > 2 for case in given.values()):
                item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, seed):
    return clear_checkpoint(lambda n: make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=n), seed)


_WORLDS: dict[int, World] = {}


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory):
    """on_ranks(N, job, *arguments) -> what each of N ranks returned. Ranks are started once for each N."""
    folder = tmp_path_factory.mktemp("ranks")

    def run(number, job, *arguments):
        return _WORLDS.setdefault(number, World(number, folder)).run(job, *arguments)

    return run


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """End the ranks behind the last test of this folder: ranks that wait take a quarter of a core from other tests."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for world in _WORLDS.values():
            world.close()
        ORIGIN.close()


class Proven:
    """What the ranks saw of a case, each of which runs once."""

    def __init__(self, proof: matrix.Proof):
        self.proof, self.seen = proof, {}

    def ranks(self, case: Case) -> list[dict]:
        key = case.ranks, case.name
        if key not in self.seen:
            (self.seen[key],) = self.proof.run([case])
        return self.seen[key]

    def outcome(self, case: Case):
        return self.proof.judge(case, self.ranks(case))


@pytest.fixture(scope="session")
def proven(checkpoint, on_ranks, tmp_path_factory):
    def job(number, *arguments, timeout):
        on_ranks(number, planted.main, *arguments)
        return subprocess.CompletedProcess(arguments, 0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matrix, "_torchrun", job)
        yield Proven(matrix.Proof(checkpoint, tmp_path_factory.mktemp("proof")))


@pytest.fixture(scope="session")
def reference(proven):
    """reference(forced) -> what transformers computes in one process, see `proof.reference`."""
    return lambda forced: proven.proof.reference(forced=forced)
