"""Who may import whom, and what may not be used at all. Read from the sources, so no package has to be installed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEVELS = (
    (
        "errors",
        "types",
        "clock",
        "whereabouts",
        "messages",
        "parent",
        "disk",
        "checkpoint_folder",
        "shipped",
        "prometheus",
    ),
    ("models",),
    ("config",),
    ("trace", "objectives", "planning", "tasks"),
    ("replay", "vllm", "weights"),
    ("rollout", "megatron"),
    ("gateway",),
    ("train", "report"),
    ("proof", "comparison"),
    ("cli", "commands", "tools", "__main__"),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ONLY_IN = {"megatron": {"megatron"}, "vllm": {"vllm", "weights"}}
TORCH_FREE = (
    "errors",
    "types",
    "messages",
    "models",
    "config",
    "trace",
    "tasks",
    "planning",
    "report",
    "rollout",
    "gateway",
)
NEEDS_TORCH = {"torch", "transformers", "megatron", "vllm", "safetensors.torch"}
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
# Whose unpickler refuses every name but those of a list.
RESTRICTS_PICKLE = ROOT / "moe_rl/megatron/unpickling.py"
# Reads tokenizers that are no tokenizer.json, and chat templates, through transformers, which it imports when it must.
READS_TOKENIZERS = ROOT / "moe_rl/tasks/tokenizer.py"
# Asks transformers, without torch and in a process of its own, what it makes of config.json.
READS_CONFIGS = ROOT / "moe_rl/models/second_reading.py"
UNSAFE_BUILTINS = {"eval", "exec"}


def sources() -> list[Path]:
    return sorted(path for folder in ("moe_rl", "tools") for path in (ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "tools" if parts[0] == "tools" else parts[1]


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every import, also inside functions. package: of the file, for relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def import_faults(text: str, room: str, package: tuple[str, ...] = ()) -> list[str]:
    faults = []
    for line, name in imported(ast.parse(text), package):
        parts = name.split(".")
        if parts[0] == "moe_rl" and len(parts) > 1 and LEVEL.get(parts[1], 0) > LEVEL[room]:
            faults.append(f"{line}: {room} imports moe_rl.{parts[1]}, which stands above it")
        if parts[0] == "tools" and room != "tools":
            faults.append(f"{line}: {room} imports {name}")
        if parts[0] in ONLY_IN and room not in ONLY_IN[parts[0]]:
            faults.append(f"{line}: {parts[0]} is imported in {room}")
        if room in TORCH_FREE and within(name, NEEDS_TORCH):
            faults.append(f"{line}: {room} imports {name}, but is free of torch")
    return faults


def unsafe_faults(text: str) -> list[str]:
    tree = ast.parse(text)
    faults = [f"{line}: imports {name}" for line, name in imported(tree, ()) if within(name, UNSAFE_MODULES)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in UNSAFE_BUILTINS or called.removeprefix("builtins.") in UNSAFE_BUILTINS:
            faults.append(f"{node.lineno}: calls {called}")
        if called == "torch.load" and keywords.get("weights_only") != "True":
            faults.append(f"{node.lineno}: torch.load without weights_only=True")
        if called in ("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"):
            faults.append(f"{node.lineno}: calls {called}")
        if keywords.get("allow_pickle", "False") != "False":
            faults.append(f"{node.lineno}: allow_pickle={keywords['allow_pickle']}")
    return faults


def source_faults(path: Path) -> list[str]:
    """What in a file breaks the rules of imports, or is unsafe."""
    text, room = path.read_text(encoding="utf-8"), room_of(path)
    faults = unsafe_faults(text)
    if path == RESTRICTS_PICKLE:
        used = set(re.findall(r"pickle\.\w+", text)) - {"pickle.Unpickler", "pickle.UnpicklingError", "pickle.load"}
        faults = [fault for fault in faults if not fault.endswith(": imports pickle")] + sorted(used)
    if path == ROOT / "moe_rl/__init__.py":
        # Its names are looked up when they are asked for: every worker of vLLM imports it.
        names = [name for _, name in imported(ast.parse(text), ())]
        return faults + [f"imports {name}" for name in names if name != "importlib.import_module"]
    if room not in LEVEL:
        return [*faults, f"{room} has no place in the import order; give it one here and in the design"]
    found = import_faults(text, room, path.relative_to(ROOT).parent.parts)
    if path == READS_TOKENIZERS:
        late = re.findall(r"^    from (transformers) import", text, re.M)
        assert len(late) == 1 and "import transformers" not in text
        found = [fault for fault in found if "transformers" not in fault]
    if path == READS_CONFIGS:
        assert text.index('sys.modules["torch"] = None') < text.index("    from transformers import")
        found = [fault for fault in found if "transformers" not in fault]
    return faults + found


def test_sources_keep_the_rules():
    found = {str(path.relative_to(ROOT)): source_faults(path) for path in sources()}
    assert len(found) > 200
    assert {path: faults for path, faults in found.items() if faults} == {}


def test_rooms_do_not_import_each_other_in_circles():
    edges: dict[str, set[str]] = {}
    for path in sources():
        tree, package = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).parent.parts
        rooms = {name.split(".")[1] for _, name in imported(tree, package) if name.startswith("moe_rl.")}
        edges.setdefault(room_of(path), set()).update(rooms & LEVEL.keys() - {room_of(path)})
    assert {"errors"} <= edges["config"], "the reader of imports has gone blind"
    while leaves := [room for room, needs in edges.items() if not needs & edges.keys()]:
        for room in leaves:
            del edges[room]
    assert edges == {}


def file_circles(sources: dict[str, str]) -> list[set[str]]:
    """Groups of modules that import each other in a circle, whether at run time or for type checkers alone.

    sources: dotted module name -> text.
    """
    edges: dict[str, set[str]] = {}
    for module, text in sources.items():
        names = {name for _, name in imported(ast.parse(text), tuple(module.split(".")[:-1]))}
        found = {name if name in sources else name.rpartition(".")[0] for name in names}
        edges[module] = found & sources.keys() - {module}
    try:
        list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        return [set(error.args[1])]
    return []


def test_files_do_not_import_each_other_in_circles():
    package = [path for path in sources() if room_of(path) != "tools"]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text("utf-8") for path in package}
    assert "moe_rl.train.loop" in named and file_circles(named) == []


@pytest.mark.parametrize("guard", ["", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "])
def test_planted_circles_of_files_are_found(guard):
    planted = {"moe_rl.a.x": "from moe_rl.b.y import f", "moe_rl.b.y": f"{guard}from moe_rl.a import x\n"}
    assert file_circles(planted) == [{"moe_rl.a.x", "moe_rl.b.y"}]
    assert file_circles(planted | {"moe_rl.b.y": "from moe_rl.a.z import x"}) == []


def test_a_name_stands_for_one_thing():
    """Base names of files and names of classes: each is used once in the package."""
    package = [path for path in sources() if room_of(path) != "tools" and not path.name.startswith("__")]
    classes = [
        node.name
        for path in package
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    files = [path.stem for path in package]
    assert "loop" in files and "ReplayPass" in classes
    assert [name for name, times in Counter(files).items() if times > 1] == []
    assert [name for name, times in Counter(classes).items() if times > 1] == []


def test_a_variable_is_named_for_what_it_holds():
    """Nobody can tell what `one`, `at` or `found` is. A field may be called so: its class says what it is."""
    vague = []
    for path in (ROOT / "moe_rl").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        fields = [
            entry.target
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for entry in node.body
            if isinstance(entry, ast.AnnAssign)
        ]
        for node in ast.walk(tree):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name in ("one", "at", "found"):
                vague.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not vague


def test_torch_free_rooms_import_without_torch():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        # Adapters import packages of extras. tests/tasks/test_adapters.py imports them where these are installed.
        if room_of(path) in TORCH_FREE and path.parent.parts[-2:] != ("environments", "adapters")
    ]
    assert "moe_rl.config.check" in modules
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    script += "print(sorted({'torch', 'transformers', 'megatron', 'vllm'} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", script, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


@pytest.mark.parametrize(
    ("text", "room"),
    [
        ("from moe_rl.train import loop", "config"),
        ("from moe_rl import train", "config"),
        ("def f():\n    import moe_rl.megatron.model", "planning"),
        ("from ..rollout import recorder", "trace"),
        ("import tools.x", "train"),
        ("import megatron.core", "replay"),
        ("from megatron.core import parallel_state", "train"),
        ("from vllm import LLM", "train"),
        ("import torch.nn", "trace"),
        ("from torch import Tensor", "report"),
        ("from safetensors.torch import load_file", "tasks"),
    ],
)
def test_planted_imports_are_found(text, room):
    assert len(import_faults(text, room, ("moe_rl", room))) == 1


@pytest.mark.parametrize(
    ("text", "room"),
    [
        ("from moe_rl.errors import describe\nfrom .schema import Config\nimport torchy", "config"),
        ("import megatron.core\nfrom moe_rl.replay import replay_pass\nimport torch", "megatron"),
        ("def f():\n    from vllm import LLM", "vllm"),
        ("from safetensors.numpy import load_file", "trace"),
    ],
)
def test_right_imports_pass(text, room):
    assert import_faults(text, room, ("moe_rl", room)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "def f():\n    import cloudpickle as c", "import marshal",
        "eval('1')", "exec(code)", "import builtins\nbuiltins.eval('1')",
        "torch.load(f)", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=flag)",
        "numpy.load(f, allow_pickle=True)", "yaml.unsafe_load(f)",
    ],
)  # fmt: skip
def test_planted_unsafe_calls_are_found(text):
    assert len(unsafe_faults(text)) == 1


@pytest.mark.parametrize(
    "text", ["model.eval()", "torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)", "re.compile('x')"]
)
def test_harmless_calls_pass(text):
    assert unsafe_faults(text) == []


def test_no_test_stops_the_clock_of_the_whole_process():
    """A test that replaces `time.monotonic` or `time.sleep` does so for each thread: an event loop that looks at the
    clock meanwhile may wait for hours. Replace the name `time` in the module under test."""
    stops = re.compile(r"""\btime, "(?:monotonic|sleep|perf_counter)"|["']time\.(?:monotonic|sleep|perf_counter)["']""")
    found = [
        str(path) for path in ROOT.glob("tests/**/*.py") if path != Path(__file__) and stops.search(path.read_text())
    ]
    assert not found
