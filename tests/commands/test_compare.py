"""Tests `moe-rl compare`: a comparison that is impossible is refused with exit status 2 before anything is started."""

import argparse
import json
from pathlib import Path

import pytest

from moe_rl.commands import compare
from moe_rl.commands.compare import BUDGET_TOKENS
from moe_rl.config.check import problems
from moe_rl.config.load import dump_config, load_config
from moe_rl.errors import ConfigError
from moe_rl.train.run_folder import RunFolder
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/tiny_moe_cpu.yaml"
EPISODES = ROOT / "configs/tool_use_cpu.yaml"


def options(arguments):
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments):
    return compare.run(options(arguments))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make a run folder without rollouts."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(load_config(CONFIG, [f"run.runs_dir={tmp_path}"])))
    return folder


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["--run", "nowhere"], "--run: |nowhere|config.yaml"),
        (["--run", "{run}", "run.seed=2"], "--run: |got run.seed=2"),
        (["--run", "{run}", "train.dtype=float16"], "train.dtype"),
        (["--run", "{run}", "parallel.expert=2"], "parallel: |got 1 |multiple of 2"),
        (["--run", "{run}", "--out", "{run}/no"], "--out: |{run}/no"),
        (["--run", "{run}", "--sampler-dtype", "fp8", "fp8"], "--sampler-dtype: |got fp8 fp8"),
        (["--run", "{run}", "--sampler-dtype", "fp8", "run.seed=2"], "--run: |got run.seed=2"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--bisect", "nowhere"], "--bisect: |nowhere|config.yaml"),
        (["--bisect", "{run}", "run.seed=2"], "--bisect: |got run.seed=2"),
        (["--bisect", "{run}", "--out", "{run}/no"], "--out: |{run}/no"),
        (["--run", "{run}", "--engines"], "--engines: |--bisect"),
        (["--config", str(CONFIG), "rollout.dtpye=float32"], "rollout.dtpye|rollout.dtype?"),
    ],
)
def test_bad_input_is_told_before_anything_starts(run, capsys, monkeypatch, arguments, pieces):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main([argument.format(run=run) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert all(piece.format(run=run) in said.err for piece in pieces.split("|")) and said.out == ""
    assert not list(run.glob("routing_kl*"))


@pytest.mark.parametrize(
    "overlap", ["train.overlap_expert_parallel_comm=true", "replay.overlap_chunks=2", "placement.experts=traced"]
)
def test_one_rank_drops_what_only_a_layout_can_have(run, monkeypatch, overlap):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    layout = ["parallel.expert=2", overlap, "train.packing=load", "train.dtype=bfloat16"]
    trained = load_config(run / "config.yaml", layout)
    (run / "config.yaml").write_text(dump_config(trained))
    config, _ = compare._configure(options(["--run", str(run)]))
    assert problems(trained, 2) == problems(config, 1) == []
    # the layout's settings alone would have been refused on one rank
    section = overlap.partition(".")[0]
    assert problems(config.model_copy(update={section: getattr(trained, section)}), 1) != []


def test_a_run_is_compared_where_its_prompts_and_its_first_folder_are_not(run, monkeypatch, tmp_path):
    """It kept its prompts, and what is written goes to its folder or --out."""
    config = load_config(run / "config.yaml", ["run.runs_dir=/proc/nobody/runs", "task.train.0.data=/gone.jsonl"])
    (run / "config.yaml").write_text(dump_config(config))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(compare, "_compare", lambda config, folder, options: 0)
    assert main(["--run", str(run)]) == 0
    assert main(["--config", str(run / "config.yaml")]) == 2


def test_a_precision_that_is_none(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--run", str(run), "--sampler-dtype", "fp4"])
    assert ended.value.code == 2
    assert "--sampler-dtype: got fp4, expected one of bfloat16, float32, fp8" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["-1", "many", "1e5"])
def test_a_budget_that_is_no_number(run, capsys, tokens):
    with pytest.raises(SystemExit) as ended:
        main(["--run", str(run), f"--budget-tokens={tokens}"])
    assert ended.value.code == 2 and f"--budget-tokens: got {tokens}" in capsys.readouterr().err


def test_a_model_that_is_gone_is_told(run, capsys, tmp_path):
    text = (run / "config.yaml").read_text().replace("assets/tiny_moe/policy", str(tmp_path / "gone"))
    (run / "config.yaml").write_text(text)
    assert main(["--run", str(run)]) == 2
    assert str(tmp_path / "gone") in capsys.readouterr().err


def test_the_help_says_what_the_exit_status_means(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the interval of the paired difference of the policy KL k3, native less replay, lies above 0" in said
    assert "self-test passes" in said and "3 if not. 2 for bad input." in said


@pytest.mark.parametrize(("config", "budget"), [(CONFIG, BUDGET_TOKENS), (EPISODES, 0)])
def test_more_prompts_are_sampled_only_where_a_completion_answers_them(run, config, budget):
    """An environment writes its prompts itself: the rows of its data are none."""
    (run / "config.yaml").write_text(dump_config(load_config(config)))
    for given, taken in (([], budget), (["--budget-tokens", "0"], 0)):
        asked = options(["--run", str(run), *given])
        compare._configure(asked)
        assert asked.budget_tokens == taken


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(["--config", str(EPISODES)], "--config"), (["--run", "{run}", "--budget-tokens", "9"], "--budget-tokens")],
)
def test_prompts_of_an_environment_are_not_sampled(run, arguments, option):
    (run / "config.yaml").write_text(dump_config(load_config(EPISODES)))
    with refused(ConfigError, option=option, given="task.environment is set"):
        compare._configure(options([argument.format(run=run) for argument in arguments]))


@pytest.mark.parametrize("world_size", ["", "2"])
@pytest.mark.parametrize(
    "sampled",
    [
        ["rollout.servers=[http://127.0.0.1:8000]", "rollout.token_file=t", "rollout.weight_transfer=broadcast",
         "rollout.vllm.stream_interval=8"],
        ["rollout.engines=2", "rollout.in_flight=64", "rollout.weight_transfer=disk"],
    ],
)  # fmt: skip
def test_what_is_checked_is_the_one_engine_that_samples(run, monkeypatch, capsys, sampled, world_size):
    monkeypatch.setenv("WORLD_SIZE", world_size) if world_size else monkeypatch.delenv("WORLD_SIZE", raising=False)
    (run / "config.yaml").write_text(dump_config(load_config(CONFIG, sampled)))
    checked = []
    monkeypatch.setattr(compare, "installation_problems", lambda config: checked.append(config) or ["no vLLM"])
    assert main(["--run", str(run)]) == main(["--bisect", str(run), "--engines"]) == 2
    assert "no vLLM" in capsys.readouterr().err
    own = load_config(CONFIG).rollout
    assert checked and all(config.rollout == own for config in checked)


def test_the_results_are_written_before_they_are_shown(run, monkeypatch):
    import torch

    from moe_rl.comparison import experiment, kl_page
    from moe_rl.megatron import world

    def fails(*about):
        raise ValueError

    for module, name, stand_in in (
        (world, "start", lambda *about, **settings: None),
        (world, "stop", lambda: None),
        (torch.distributed, "get_rank", lambda: 0),
        (experiment, "compare", lambda asked: ({"rows": 1}, None)),
        (kl_page, "text", fails),
    ):
        monkeypatch.setattr(module, name, stand_in)
    asked = options(["--run", str(run), "--json", str(run / "copy.json")])
    with pytest.raises(ValueError):
        compare._compare(*compare._configure(asked), asked)
    assert [json.loads((run / name).read_text()) for name in ("routing_kl.json", "copy.json")] == [{"rows": 1}] * 2


@pytest.mark.parametrize("start", [None, "adapters"])
def test_a_bisection_has_the_weights_that_the_run_began_with(run, monkeypatch, start):
    """Those in model.path, or with the adapters of train.lora.start merged into them."""
    from moe_rl.comparison import run_sides, sources
    from moe_rl.megatron import world

    written, given = {}, []
    later = run / "checkpoints/step-000002"
    monkeypatch.setattr(sources, "of_run", lambda run, config: (1, [sources.Weights(0, None)]))
    monkeypatch.setattr(compare.checkpoints, "complete", lambda folder: [(2, later)])
    monkeypatch.setattr(compare, "write_weights", lambda path, out, *about: written.update({out: path}))
    monkeypatch.setattr(world, "start", lambda *about, **settings: None)
    monkeypatch.setattr(world, "stop", lambda: None)
    monkeypatch.setattr(run_sides, "sides_of_run", lambda config, run, versions, out: given.append(versions))
    config = load_config(CONFIG, [f"train.lora={{rank: 8, alpha: 16, start: {start or 'null'}}}"])
    with compare._sides(config, RunFolder(run), None):
        (versions,) = given
        paths = {version: written.get(folder, folder) for version, folder in versions.folders.items()}
        assert paths == {0: None if start else config.model.path, 2: later}
