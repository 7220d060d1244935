"""Tests that every mistake is reported in one message, before anything is started."""

import argparse
import datetime
import json
import operator
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.commands import train
from moe_rl.config.load import dump_config, load_config
from moe_rl.errors import describe
from moe_rl.tasks import prompt_file
from moe_rl.tasks.prompt_ledger import PromptLedger, StepPrompts
from moe_rl.trace import ShardWriter, TraceSpec
from moe_rl.train import run_folder
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.run_inputs import read_inputs, write_inputs
from moe_rl.types import Provenance, Span
from tests.commands.forked_train import Launcher
from tests.support.task import task_of

ROOT = Path(__file__).parents[2]
CONFIG = "configs/tiny_moe_cpu.yaml"


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs the command as one rank, each time in a process of its own."""
    launcher = Launcher(tmp_path_factory.mktemp("runs"))
    yield launcher
    launcher.close()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config", "no/such.yaml"], ["no/such.yaml"]),
        (["--config", CONFIG, "rollout.temprature=1"], ["rollout.temprature", "temperature"]),
        (["--config", CONFIG, "train.updates_per_step=5"], ["train.updates_per_step"]),
        (["--config", CONFIG, "model.path=assets/nothing"], ["model.path", "assets/nothing"]),
        (
            ["--config", CONFIG, "task.train.0.data=missing.jsonl"],
            ["task.train.0.data: there is no such file (missing.jsonl)"],
        ),
        (["--config", CONFIG, "task.pass_reward=nonsense"], ["task.pass_reward", "nonsense"]),
        (["--config", CONFIG, "parallel.expert=3"], ["parallel.expert"]),
        (
            ["--config", CONFIG, "train.overlap_expert_parallel_comm=true", "train.delay_wgrad_compute=true"],
            ["train.delay_wgrad_compute", "got no transformer-engine"],
        ),
        (["--resume", "moe_rl"], ["--resume", "config.yaml"]),
        (["--replay", "moe_rl"], ["--replay", "moe_rl", "config.yaml"]),
        (["--replay", "runs/nope"], ["--replay", "there is no such folder (runs/nope)"]),
        (["--resume", "runs/nope"], ["--resume", "there is no such folder (runs/nope)"]),
    ],
)
def test_one_message_and_nothing_started(launch, arguments, words):
    result = launch(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("moe_rl: ") and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert "NOT IMPORTED" in result.stdout
    # the other ranks find the same and leave the telling to the first
    assert launch(*arguments, rank=1).stderr == ""


def test_the_first_rank_has_time_to_tell(monkeypatch, capsys):
    """torchrun ends all ranks as soon as one ends, so a faster rank would silence the rank that prints the problem."""
    options, waited = (
        argparse.Namespace(
            config=Path("no/such.yaml"),
            resume=None,
            replay=None,
            step=None,
            trace=None,
            speeds=None,
            plan=False,
            accept=[],
            json=None,
        ),
        [],
    )
    options.overrides = []
    monkeypatch.setattr(train, "time", argparse.Namespace(sleep=waited.append))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train.run(options) == 2
        assert "no/such.yaml" in capsys.readouterr().err
        assert len(waited) == int(rank)


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"id": ["a"], "prompt": "1+1=", "answer": "2", "level": "1"}', "list"),
        ('{"id": "a", "prompt": "1+1=", "answer": "2"}', "level"),
        ('{"id": "a", "prompt": "' + "1+" * 99 + '", "answer": "2", "level": "1"}', "rollout.max_prompt_tokens"),
        ("{", "JSON"),
    ],
)
def test_what_is_wrong_in_a_prompt_file_is_told_before_anything_starts(launch, tmp_path, line, words):
    """Only rank 0 checks these files, because only rank 0 uses them. The prompt file has enough lines."""
    good = (ROOT / "assets/tiny_moe/task/train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*good, line]) + "\n")
    result = launch("--config", CONFIG, f"task.train.0.data={tmp_path / 'train.jsonl'}")
    assert result.returncode == 2 and "NOT IMPORTED" in result.stdout
    assert (
        "task.train.0: " in result.stderr
        and f"{tmp_path / 'train.jsonl'}:{len(good) + 1}" in result.stderr
        and words in result.stderr
    )


def write_model(folder, change):
    """Copy the demo's policy into a folder; change(what config.json says) is what the copy's says."""
    shutil.copytree(ROOT / "assets/tiny_moe/policy", folder, dirs_exist_ok=True)
    published = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(published)))
    return published


def test_a_dense_model_is_refused(launch, tmp_path):
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    write_model(tmp_path, lambda raw: {k: v for k, v in raw.items() if "expert" not in k} | dense)
    result = launch("--config", CONFIG, f"model.path={tmp_path}")
    assert result.returncode == 2 and "Qwen3ForCausalLM" in result.stderr


def test_a_checkpoint_that_lacks_a_tensor_is_refused(launch, tmp_path):
    raw = write_model(tmp_path, lambda raw: raw | {"num_experts": raw["num_experts"] + 2})
    result = launch("--config", CONFIG, f"model.path={tmp_path}")
    assert result.returncode == 2 and f"experts.{raw['num_experts']}." in result.stderr


def test_without_torchrun_it_says_how_to_start(launch):
    result = launch("--config", CONFIG, ranks=0)
    assert result.returncode == 2 and "torchrun --nproc-per-node 2" in result.stderr


def test_plan_tells_what_a_trace_asks_of_the_ranks_without_torch(launch, tmp_path):
    """Make two sequences of two tokens that all go to experts 0 to 3, which are on the first of two ranks."""
    spec = TraceSpec.from_layers("any", 32, 4, tuple(range(8)), 8)
    with ShardWriter(tmp_path / "trace", "step000001", spec) as writer:
        for number in range(2):
            routes = np.tile(np.arange(4, dtype=np.uint8), (2, 8, 1))
            writer.add(f"s1/p{number}/c0", routes, np.arange(2, dtype=np.int32), [Span(2, 0, Provenance.DECODE)])
    file, given = tmp_path / "plan.json", ["--config", CONFIG, "--plan", "--trace", tmp_path / "trace"]
    result = launch(*given, "--json", file, "--speeds", "200,50", "train.updates_per_step=1", ranks=0)
    assert result.returncode == 0 and "NOT IMPORTED" in result.stdout, result.stdout + result.stderr
    balance = json.loads(file.read_text())["balance"]
    assert (balance["ratio"], balance["engines"], balance["idle_overlapped"]) == (0.25, 1, [0.5, 0.0])
    assert "samplers for a trainer" in result.stdout
    unknown = launch("--config", CONFIG, "--plan", "--speeds", tmp_path, ranks=0)
    assert unknown.returncode == 2 and "--speeds" in unknown.stderr and str(tmp_path) in unknown.stderr
    # each rank has one of them and six rows of padding, which go to both ranks alike
    found = json.loads(file.read_text())["trace"]
    assert (found["sequences"], found["layers"], found["exact"]) == (2, 8, True)
    assert found["rows"]["rank"] == 2 * (2 * 4 + 6 * 2) and found["rows"]["even"] == 2 * 8 * 4 // 2
    assert found["rows"]["microbatch"] == 8 * found["rows"]["rank"] and found["rows"]["worst"] == 2 * 8 * 4
    sizes = json.loads((ROOT / "assets/tiny_moe/policy/config.json").read_text())
    assert found["row_bytes"] == 4 * (sizes["hidden_size"] + 6 * sizes["moe_intermediate_size"])
    assert "worst case" in result.stdout
    refused = launch(*given, "replay.max_rows=39", "train.updates_per_step=1", ranks=0)
    assert refused.returncode == 2 and "replay.max_rows" in refused.stdout and "got 40" in refused.stdout
    nowhere = launch("--config", CONFIG, "--plan", "--trace", tmp_path / "nowhere", ranks=0)
    assert nowhere.returncode == 2 and str(tmp_path / "nowhere") in nowhere.stdout
    other = launch(*given, "model.path=assets/tiny_moe/policy", "--trace", foreign(tmp_path), ranks=0)
    assert other.returncode == 2 and "s9" in other.stdout
    alone = launch("--config", CONFIG, "--trace", tmp_path / "trace")
    assert alone.returncode == 2 and "--trace" in alone.stderr and "--plan" in alone.stderr


def foreign(folder):
    """Make a trace of a model with fewer layers."""
    with ShardWriter(folder / "foreign", "step000001", TraceSpec.from_layers("any", 32, 4, (0, 1), 2)) as writer:
        routes = np.tile(np.arange(4, dtype=np.uint8), (2, 2, 1))
        writer.add("s9/p0/c0", routes, np.arange(2, dtype=np.int32), [Span(2, 0, Provenance.DECODE)])
    return folder / "foreign"


def test_plan_prints_numbers_and_problems_without_torch(launch, tmp_path):
    file = tmp_path / "plan.json"
    result = launch("--config", CONFIG, "--plan", "--json", file, ranks=0)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NOT IMPORTED" in result.stdout and "no problems" in result.stdout
    assert json.loads(file.read_text())["plan"]["layout"]["experts_per_rank"] == 16
    broken = launch("--config", CONFIG, "--plan", "train.microbatch_tokens=8", "parallel.expert=3", ranks=0)
    assert broken.returncode == 2
    assert "train.microbatch_tokens" in broken.stdout and "parallel.expert" in broken.stdout


def begun(folder, *overrides):
    """Write what a run has written before its first step."""
    config = load_config(CONFIG, overrides)
    (folder / "config.yaml").write_text(dump_config(config))
    write_inputs(RunFolder(folder), read_inputs(config, task_of(config)))


def test_what_a_run_reads_and_has_changed_is_told_before_anything_starts(launch, tmp_path):
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    run.mkdir()
    shutil.copy(ROOT / "assets/tiny_moe/task/train.jsonl", rows)
    begun(run, f"task.train.0.data={rows}")
    (run / "checkpoints/step-000000").mkdir(parents=True)
    first = json.loads(rows.read_text().partition("\n")[0])
    rows.write_text(rows.read_text().replace(f'"answer": "{first["answer"]}"', '"answer": "0"', 1))
    name = f"sums/{first['id']}"
    for more in ([], ["--plan"], ["--accept", "heldout"]):
        refused = launch("--resume", run, *more)
        told = refused.stdout if "--plan" in more else refused.stderr
        assert refused.returncode == 2 and f"train/sums: 1 rows changed ({name})" in told
        assert "NOT IMPORTED" in refused.stdout
    accepted = launch("--resume", run, "--plan", "--accept", "train/sums")
    assert accepted.returncode == 0 and "no problems" in accepted.stdout
    alone = launch("--config", CONFIG, "--accept", "model")
    assert alone.returncode == 2 and "--accept" in alone.stderr and "without --resume or --replay" in alone.stderr


def test_lines_that_a_run_cannot_go_on_with_are_told_before_anything_starts(launch, tmp_path):
    begun(tmp_path)
    (tmp_path / "checkpoints/step-000002").mkdir(parents=True)
    ledger, metrics = PromptLedger(tmp_path / "prompts.jsonl"), tmp_path / "metrics.jsonl"
    ledger.record(0, [0], ["a"], "digest")
    lost = launch("--resume", tmp_path)
    assert str(ledger.path) in lost.stderr and "got 1 " in lost.stderr
    ledger.record(1, [1], ["b"], "digest")
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole.replace(b'"a"', b'"c"'))
    changed = launch("--resume", tmp_path)
    assert f"{ledger.path}:1" in changed.stderr
    ledger.path.write_bytes(whole)
    metrics.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "ki\n{"step": 3, "kind": "train"}\n')
    damaged = launch("--resume", tmp_path)
    assert f"{metrics}:2" in damaged.stderr
    for refused in (lost, changed, damaged):
        assert refused.returncode == 2 and refused.stderr.count("\n") == 2
        assert "NOT IMPORTED" in refused.stdout


def test_a_run_is_resumed_with_the_listed_keys_alone(launch, tmp_path):
    begun(tmp_path)
    file = tmp_path / "plan.json"
    planned = launch("--resume", tmp_path, "--plan", "--json", file, "parallel.expert=4", ranks=4)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert json.loads(file.read_text())["plan"]["layout"]["experts_per_rank"] == 8
    refused = launch(
        "--resume", tmp_path, "parallel.expert=4", "run.seed=9", "run.steps=9", "task.verifier_workers=2", ranks=4
    )
    assert refused.returncode == 2 and "NOT IMPORTED" in refused.stdout
    assert "got run.seed = 9 (was 1), task.verifier_workers = 2 (was 1), expected" in refused.stderr
    assert all(key in refused.stderr for key in ("parallel.*", "run.steps", "eval.*", "train.optimizer.lr"))
    unfit = launch("--resume", tmp_path, "parallel.expert=3", ranks=3)
    assert unfit.returncode == 2 and "parallel.expert" in unfit.stderr
    assert str(tmp_path / "checkpoints") in unfit.stderr and "--step 0" in unfit.stderr
    (tmp_path / "checkpoints/step-000004").mkdir(parents=True)
    absent = launch("--resume", tmp_path, "--step", "3", ranks=2)
    assert absent.returncode == 2 and "steps 4" in absent.stderr and "step-000003" in absent.stderr
    PromptLedger(tmp_path / "prompts.jsonl").path.write_bytes(
        b"".join(StepPrompts(step, [(step, 1)], ["a"], [], "digest").line() + b"\n" for step in range(4))
    )
    short = launch("--resume", tmp_path, "run.steps=3", "train.optimizer.warmup_steps=3", ranks=2)
    assert short.returncode == 2 and "run.steps: " in short.stderr and "at least 4" in short.stderr
    alone = launch("--config", CONFIG, "--step", "3", ranks=2)
    assert alone.returncode == 2 and "--step" in alone.stderr and "--resume" in alone.stderr


def test_a_run_to_start_from_is_checked_before_anything_starts(launch, tmp_path):
    def told(*overrides):
        result = launch("--config", CONFIG, "run.steps=40", *overrides)
        assert result.returncode == 2 and "NOT IMPORTED" in result.stdout
        return result.stderr

    other = f"model.from_run={tmp_path}"
    assert "model.from_run" in told(other)  # no run folder
    config = load_config(CONFIG, ["train.dtype=bfloat16"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert "the run has no checkpoint" in told(other)
    (tmp_path / "checkpoints/step-000004").mkdir(parents=True)
    assert "step-000003" in told(other, "model.from_step=3")
    form = told(other, "model.from_optimizer=true")
    assert "train.dtype" in form and "got float32, expected bfloat16" in form
    assert "model.from_step" in told("model.from_step=3")
    assert "model.from_optimizer" in told("model.from_optimizer=true")
    model = tmp_path / "model"
    write_model(model, lambda raw: raw | {"moe_intermediate_size": 24})
    (tmp_path / "config.yaml").write_text(dump_config(load_config(CONFIG, [f"model.path={model}"])))
    assert "another model" in told(other) and "experts.0" in told(other)


def test_an_unpatched_vllm_is_refused(monkeypatch, capsys):
    from moe_rl.commands import train
    from moe_rl.vllm import patches

    monkeypatch.setenv("WORLD_SIZE", "2")
    fault = describe("vLLM is not patched", do="run moe-rl patch --apply")
    monkeypatch.setattr(patches, "problems", lambda capture: [fault])
    monkeypatch.chdir(ROOT)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert train.run(parser.parse_args(["--config", CONFIG])) == 2
    assert "vLLM is not patched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said", "status"),
    [
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", 3),
        ("AcceleratorError", "CUDA error: device-side assert triggered", 1),
        ("distributed.DistBackendError", "NCCL error: remote process exited", 3),
        ("distributed.DistBackendError", "NCCL error: invalid usage", 1),
        ("OutOfMemoryError", "CUDA out of memory", 1),
    ],
)
def test_a_fault_of_cuda_or_nccl_is_a_loss_which_a_scheduler_begins_again(monkeypatch, capsys, name, said, status):
    """A mistake would only come again."""
    import torch.distributed

    def breaks(*_):
        raise operator.attrgetter(name)(torch)(said)

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "moe_rl.train.loop", SimpleNamespace(train=breaks))
    monkeypatch.setattr(train, "every_problem", lambda *_, **__: ([], None))
    monkeypatch.setattr(train, "inputs_and_changes", lambda *_: ([], []))
    monkeypatch.setattr(train, "_leave", sys.exit)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    with pytest.raises(SystemExit) as left:
        train.run(parser.parse_args(["--config", CONFIG]))
    assert left.value.code == status and said in capsys.readouterr().err


def test_the_verb_plan_is_a_run_with_plan(capsys, monkeypatch):
    from moe_rl.commands import train

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parser = argparse.ArgumentParser()
    train.add_plan_arguments(parser)
    for more, status, told in (([], 0, "no problems"), (["train.optimizer.warmup_steps=999"], 2, "1 problem")):
        assert train.run(parser.parse_args(["--config", CONFIG, "--ranks", "2", *more])) == status
        assert capsys.readouterr().out.splitlines()[-1] == told


@pytest.mark.parametrize("script", ["/usr/bin/moe-rl", "/site-packages/moe_rl/__main__.py"])
def test_the_console_command_is_named_to_torchrun_as_a_module(script, capsys, monkeypatch):
    from moe_rl.commands import train

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", [script, "train", "--config", CONFIG])
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert train.run(parser.parse_args(sys.argv[2:])) == 2
    assert f"torchrun --nproc-per-node 2 -m moe_rl train --config {CONFIG}" in capsys.readouterr().err


def test_more_ranks_than_a_machine_can_hold_are_refused_before_they_start(capsys, monkeypatch):
    from moe_rl.commands import launch, train

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(train.os, "sched_getaffinity", lambda pid: range(2))
    monkeypatch.setattr(launch, "start", lambda ranks, *given: ranks)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    asked = [train.run(parser.parse_args(["--config", CONFIG, "--ranks", ranks])) for ranks in ("32", "33")]
    assert asked == [32, 2] and "got 33, expected at most 32, 16 for each processor core" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_the_prompts_of_a_new_run_have_the_day_that_its_folder_will_have(tmp_path, monkeypatch, verb):
    """An earlier run has kept its prompts beside the file, with the day on which it began."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(prompt_file, "SMALLEST_BYTES", 0)
    shutil.copytree("assets/tiny_gym/policy", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    template = tmp_path / "model/chat_template.jinja"
    template.write_text('Today is {{ strftime_now("%Y-%m-%d") }}.' + template.read_text())
    for name in ("train", "heldout"):
        shutil.copy(f"assets/tiny_moe/task/{name}.jsonl", tmp_path)
    parser = argparse.ArgumentParser()
    (train.add_arguments if verb == "train" else train.add_plan_arguments)(parser)
    given = [f"model.path={tmp_path}/model", f"run.runs_dir={tmp_path}/r", "task.chat={}"]
    given += [f"task.{name}.0.data={tmp_path}/{name}.jsonl" for name in ("train", "heldout")]
    given += ["rollout.max_prompt_tokens=200"]
    for day in (datetime.date(2001, 2, 3), datetime.date(2001, 2, 4)):
        monkeypatch.setattr(run_folder, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda day=day: day)))
        config, _, _ = train._configure(parser.parse_args(["--config", CONFIG, "--ranks", "2", *given]))
        assert task_of(config).train[0].prompts[0].text.startswith(f"Today is {day}.")
        assert (tmp_path / "train.jsonl.sums.prompts").is_file()
        assert load_config(run_folder.create(config).config).run.date == day
