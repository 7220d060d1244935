"""Sets in which order and by which worker tests run, not by the clock; shows what comparisons left out."""

import gc
import os
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.support.near_ties import ROWS, Rows

# Tests run beside each other: threads of torch would wait for each other, and take CPU time while they do. This is
# before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Clients of other makers ask a proxy for this machine's own addresses, unless told not to.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))

# Imports and the collection of tests make millions of objects that stay. Looking for garbage among them takes seconds.
gc.disable()

# A time limit for an example tells how busy the machine is, and fails on a slow one. What goes before a commit tries
# the same examples each time, so that a commit is refused for what it changes; `make test-all` looks for new ones.
hypothesis.settings.register_profile("same examples", deadline=None, derandomize=True)
hypothesis.settings.register_profile("new examples", deadline=None)
hypothesis.settings.load_profile("same examples")

# Folders with whole runs, several ranks, real engines: the longest first.
_FIRST = ("end_to_end", "distributed", "rollout", "gateway")
# Files whose tests share what is slow to start: a world of ranks, an engine.
_ON_ENGINE = ("test_engine.py", "test_weight_update.py", "test_in_flight.py", "test_feed_on_engine.py")
_ON_TALKER = tuple(
    f"test_{name}.py" for name in ("openai", "anthropic", "web", "turn_sampler", "updates", "own_template", "training")
)
_SHARED = {f"rollout/{name}": "engine" for name in _ON_ENGINE} | {f"gateway/{name}": "talker" for name in _ON_TALKER}
# Files whose tests take minutes each, and share nothing but a run on disk.
_APART = ("test_run.py", "test_faults.py", "test_resume.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=1, help="random models for each comparison with an independent model")
    parser.addoption("--part", metavar="K/N", help="of the chosen tests, run every N-th, beginning with number K mod N")


def pytest_configure(config: pytest.Config) -> None:
    if part := config.getoption("part"):
        config.pluginmanager.register(_Part(*map(int, part.split("/"))))
    if config.getoption("seeds") > 1:
        config.pluginmanager.register(_OneSeedAfterTheOther())
    if getattr(config.option, "dist", "no") == "loadgroup" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_PlainNames())


class _OneSeedAfterTheOther:
    """Lets a folder's tests of one seed follow each other, which share its models."""

    @pytest.hookimpl(trylast=True)  # behind pytest's own order
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        folders = {item.path.parent: None for item in items}
        order = {folder: at for at, folder in enumerate(folders)}
        seeds = {item: getattr(item, "callspec", None) for item in items}
        items.sort(key=lambda item: (order[item.path.parent], seeds[item].params.get("seed", 0) if seeds[item] else 0))


class _Part:
    """Keeps every `parts`-th of the tests that -m and -k chose."""

    def __init__(self, number: int, parts: int):
        self.number, self.parts = number, parts

    @pytest.hookimpl(trylast=True)  # behind the choice by marks and names
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = items[self.number % self.parts :: self.parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


class _PlainNames:
    """Takes the group that xdist adds to a test's name off again, so that --last-failed finds the test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.nodeid = report.nodeid.rpartition("@")[0] or report.nodeid


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing outside of `gpu/` for `-m gpu`: most files import what a machine with a GPU need not have."""
    if config.option.markexpr == "gpu" and collection_path.parent == Path(__file__).parent:
        return collection_path.name != "gpu"
    return None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: begun last, one would keep a single worker busy. A worker gets all tests of a group."""
    order = {name: at for at, name in enumerate(_FIRST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    for number, item in enumerate(items):
        path = item.path.relative_to(Path(__file__).parent)
        group = "ranks" if path.parts[0] == "distributed" else _SHARED.get(str(path), str(path))
        if path.parts[0] == "end_to_end" and path.name in _APART:
            group = f"{path} {number}"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run ungrouped if groups were asked for: every worker would start its own ranks and engines. From here
    on, garbage is collected among what the tests themselves make."""
    gc.freeze()
    gc.enable()
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist ignores xdist_group under this pytest: install the pinned requirements")


@pytest.fixture(scope="session")
def seed() -> int:
    """Which random model a comparison has; all its weights, embeddings too. --seeds asks for more than this one."""
    return 0


def _seeds_of(item: pytest.Item) -> range:
    """Return as many seeds as --seeds asks for, or as the mark `seeds` of a test says at most."""
    mark = item.get_closest_marker("seeds")
    return range(min([item.config.getoption("seeds"), *(mark.args if mark else ())]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seeds = _seeds_of(metafunc.definition)
    if len(seeds) > 1 and "seed" in metafunc.fixturenames and "seeds" not in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds, scope="session")


@pytest.fixture
def seeds(request) -> range:
    """The seeds of a test that has them all at once, because its engine gets their weights one after the other."""
    return _seeds_of(request.node)


_COMPARED: dict[str, Rows] = {}


@pytest.fixture(autouse=True)
def no_loss_scale():
    """Forgets Megatron's scale of the auxiliary loss, which a later test of the process would find in another shape."""
    yield
    if (loaded := sys.modules.get("megatron.core.transformer.moe.moe_utils")) is not None:
        loaded.MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.fixture(autouse=True)
def rows_left_out(request, record_property):
    """Bounds how many rows near ties leave out of a comparison with an independent model, over all its seeds."""
    yield
    if not ROWS.computed:
        return
    name, seeds = request.node.nodeid.partition("@")[0], _seeds_of(request.node)
    seed = request.node.callspec.params.get("seed", seeds[-1]) if hasattr(request.node, "callspec") else seeds[-1]
    name = name.replace(f"[{seed}-", "[").removesuffix(f"[{seed}]") if len(seeds) > 1 else name
    record_property("rows", (name, ROWS.left_out, ROWS.computed))
    rows = _COMPARED.setdefault(name, Rows())
    rows.add(ROWS)
    ROWS.clear()  # not before a test: those of its session's fixtures, which come earlier, are counted with the first
    if seed == seeds[-1]:
        rows.check()


def pytest_terminal_summary(terminalreporter) -> None:
    """Show how many rows each comparison left out, those of xdist's workers too; with more seeds also if none."""
    compared: dict[str, Rows] = {}
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        for key, value in report.user_properties if getattr(report, "when", "") == "teardown" else ():
            if key == "rows":
                name, left_out, computed = value
                compared.setdefault(name, Rows()).add(Rows(computed, left_out))
    if compared:
        terminalreporter.section("rows that near ties leave out of comparisons with independent models")
        for name, rows in compared.items():
            if rows.left_out or terminalreporter.config.getoption("seeds") > 1:
                terminalreporter.line(f"{rows}: {name}")
        total = Rows()
        for rows in compared.values():
            total.add(rows)
        terminalreporter.line(f"{total} in {len(compared)} comparisons")
