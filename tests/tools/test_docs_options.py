"""The page of all commands is up to date, and the docs name no option and no key that does not exist."""

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from moe_rl.config.objective import LOSSES, ObjectiveConfig
from moe_rl.config.reward_kinds import KINDS, RewardConfig
from moe_rl.config.schema import Config
from tools.dev.commands_page import options, page, parsers
from tools.dev.docs_blocks import docs

ROOT = Path(__file__).parents[2]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
CODE = re.compile(r"`[^`\n]+`")
KEY = re.compile(rf"`(?:{'|'.join(Config.model_fields)})(?:\.[\w*]+)+(?=`|=)")
PATH = re.compile(r"`((?:moe_rl|tests|tools|benchmarks|configs|examples|patches|requirements)/[\w/.-]+)`")
FILES = (".py", ".sh", ".json", ".html", ".jsonl", ".yaml", ".safetensors", ".log", ".lock", ".md")
# Options of programs that are not ours, and that the docs name.
OTHERS = {
    "docker": ("gpus", "ipc", "rm", "shm-size", "volume"),
    "hf": ("local-dir", "repo-type"),
    "pip": ("editable", "find-links", "no-build-isolation", "no-deps"),
    "pytest": ("dist", "part", "seeds"),
    "sbatch": ("export", "nodes", "signal"),
    "slime": (
        *("advantage-estimator", "colocate", "custom-loss-function-path", "custom-rm-path"),
        *("disable-grpo-std-normalization", "loss-type"),
        *("dynamic-sampling-filter-path", "eps-clip", "input-key", "kl-coef", "kl-loss-coef"),
        *("label-key", "max-tokens-per-gpu", "n-samples-per-prompt", "num-steps-per-rollout"),
        *("opsm-delta", "prompt-data", "rm-type", "rollout-batch-size", "rollout-max-prompt-len"),
        *("tis-clip", "use-kl-loss", "use-opsm", "use-rollout-logprobs"),
        *("use-rollout-routing-replay", "use-tis"),
    ),
    "tensorboard": ("logdir",),
    "torchrun": (
        *("local-addr", "master-addr", "master-port", "max-restarts", "nnodes", "node-rank", "nproc-per-node"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "shutdown-timeout"),
    ),
    "vllm": (
        *("data-parallel-size", "enable-eplb", "enforce-eager", "gpu-memory-utilization", "no-enable-expert-parallel"),
        *("kv-cache-memory-bytes", "load-format", "max-model-len", "pipeline-parallel-size", "tensor-parallel-size"),
        "profiler-config",
    ),
}


@pytest.fixture(scope="module")
def commands():
    return dict(parsers())


def test_the_page_of_commands_is_up_to_date():
    assert (ROOT / "docs/generated/commands.md").read_text(encoding="utf-8") == page(), "run: make generated"


def test_every_option_says_what_it_does(commands):
    assert len(commands) > 20
    assert [(name, one.dest) for name, parser in commands.items() for one in options(parser) if not one.help] == []


def test_every_generated_page_names_its_target():
    pages = re.search(r"^PAGES := ((?:\\\n|.)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    names = re.findall(r"(\w+)=[\w.]+", pages[1])
    assert len(names) == 6
    for name in names:
        text = (ROOT / f"docs/generated/{name}.md").read_text(encoding="utf-8")
        assert text.startswith("<!-- `make generated` "), name


def test_the_docs_can_be_read_in_an_evening():
    words = {path: len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md")}
    by_hand = {path: count for path, count in words.items() if "generated" not in path.parts}
    assert len(by_hand) <= 40 and sum(by_hand.values()) <= 50_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


def test_lint_reads_no_file_that_only_a_user_has():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    files = [line for line in recipe.replace("\\\n", "").splitlines() if "ruff" in line or "codespell" in line]
    assert len(files) == 3 and all(line.startswith("\t@git ls-files -z ") for line in files), files


def test_every_option_in_the_docs_exists(commands):
    scripts = [one for folder in ("tools", "benchmarks", "tests/mutants") for one in (ROOT / folder).rglob("*.py")]
    known = {name for parser in commands.values() for name in parser._option_string_actions}
    known |= {name for one in scripts for name in re.findall(r'"(--[a-z][a-z0-9-]+)"', one.read_text(encoding="utf-8"))}
    known |= {f"--{name}" for names in OTHERS.values() for name in names}
    verbs = "|".join(sorted(commands, key=len, reverse=True))
    for path in docs():
        text = path.read_text(encoding="utf-8")
        assert sorted(set(OPTION.findall(text)) - known) == [], path
        for code in CODE.findall(text):
            for verb, rest in re.findall(rf"moe-rl ({verbs})\b([^|]*)", code):
                taken = rest.partition(" -- ")[0]
                assert set(OPTION.findall(taken)) <= set(commands[verb]._option_string_actions), f"{path}: {code}"


def test_every_training_command_in_the_docs_starts_its_ranks():
    """Blocks that need a GPU or a cluster do not run in a test."""
    lines = [line for path in docs() for line in path.read_text(encoding="utf-8").splitlines()]
    training = [line for line in lines if re.match(r"(\w+=\S+ )*moe-rl train ", line)]
    assert len(training) > 20 and [line for line in training if "--ranks" not in line] == []


def test_every_key_in_the_docs_exists():
    named = {(path, key[1:]) for path in docs() for key in KEY.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 200
    assert [one for one in named if not one[1].endswith(FILES) and not exists(one[1].split("."), Config)] == []


def test_every_file_that_the_docs_name_exists():
    named = {(path, name) for path in docs() for name in PATH.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 60
    absent = [one for one in named if not (ROOT / one[1]).exists()]
    assert [one for one in absent if one[1] not in ("configs/...", "patches/vllm/VERSION")] == []


def test_keys_that_do_not_exist_are_seen():
    for key in ("task.train.0.data", "objective.clip_low", "task.rewards.right.kind", "parallel.*", "task.chat.tools"):
        assert exists(key.split("."), Config), key
    for key in ("replay.max_staleness", "task.train.0.file", "objective.clip", "run.steps.3"):
        assert not exists(key.split("."), Config), key


def exists(parts: list[str], kind: Any) -> bool:
    """Whether a dotted name leads to a key of a section, or of a value of this type. The part * stands for any key."""
    if not parts or parts == ["*"] or kind is Any:
        return True
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        family = {ObjectiveConfig: LOSSES, RewardConfig: KINDS}
        members = next((list(ones.values()) for base, ones in family.items() if issubclass(kind, base)), [kind])
        fields = [one.model_fields[parts[0]].annotation for one in members if parts[0] in one.model_fields]
        return any(exists(parts[1:], one) for one in fields)
    arguments = get_args(kind)
    if get_origin(kind) in (dict, tuple):
        return exists(parts[1:], arguments[1 if get_origin(kind) is dict else 0])
    return any(exists(parts, one) for one in arguments)
