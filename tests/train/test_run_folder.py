"""Tests who may write into a run folder."""

import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from moe_rl.config import strict_yaml
from moe_rl.config.load import dump_config, load_config
from moe_rl.errors import ConfigError
from moe_rl.report import history
from moe_rl.tasks.tokenizer import ChatTemplate
from moe_rl.train import run_folder
from moe_rl.train.run_folder import RunFolder, held
from tests.support.refusals import refused, tells

HOLD = """
import sys
from pathlib import Path
from moe_rl.train.run_folder import RunFolder, held
with held(RunFolder(Path(sys.argv[1])), first=False):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def rank(tmp_path):
    """A rank of a run that is still going."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_run_that_is_still_going_is_not_taken_over(tmp_path, rank, monkeypatch):
    monkeypatch.setattr(run_folder, "_STILL_ENDING", 0.3)
    with refused(ConfigError, folder=tmp_path), held(RunFolder(tmp_path), first=True):
        pass
    with held(RunFolder(tmp_path), first=False):  # other ranks of the same run
        pass


def test_who_is_refused_is_told_where_the_run_is(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_STILL_ENDING", 0.3)
    said = f"rank 0 is or was pid {os.getpid()} on {socket.gethostname()}"
    for _ in range(2):  # a later run does not hear of an earlier one
        with held(RunFolder(tmp_path), first=True):
            refused = pytest.raises(ConfigError, match=f"run.lock; {said}. Wait")
            with refused, held(RunFolder(tmp_path), first=True):
                pass
    assert RunFolder(tmp_path).lock.read_text() == said


def test_a_run_folder_means_the_same_in_every_working_directory(tmp_path, monkeypatch):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.jsonl").touch()
    given = ["model.path=my_model", "task.train.0.data=mine.jsonl", "task.heldout.0.data=my/hub_name", "run.runs_dir=r"]
    path = run_folder.create(load_config("tiny_moe_cpu", given)).path.absolute()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, config = run_folder.reopen(path)
    assert (config.model.path, config.run.runs_dir) == (tmp_path / "here/my_model", tmp_path / "here/r")
    assert config.task.train[0].data == str(tmp_path / "here/mine.jsonl")
    assert config.task.heldout[0].data == "my/hub_name"
    # Prompts that have moved are those of the run; digests compare their content. Another id column is another task.
    run_folder.reopen(path, ["task.train.0.data=moved.jsonl", "model.path=moved"])
    with refused(ConfigError, folder=path):
        run_folder.reopen(path, ["task.train.0.data=moved.jsonl", "task.train.0.id=null"])


def test_a_resume_may_change_what_the_errors_that_end_a_run_advise(tmp_path):
    path = run_folder.create(load_config("tiny_moe_cpu", [f"run.runs_dir={tmp_path}"])).path
    for change in ("guards.alignment=false", "guards.max_canary_difference=2.0", "guards.same_version=false",
                   "task.max_failed_fraction=0.3", "task.verifier_timeout_seconds=20", "rollout.max_lost_servers=1",
                   "rollout.startup_timeout_seconds=3600"):  # fmt: skip
        run_folder.reopen(path, [change])
    with refused(ConfigError, folder=path):
        run_folder.reopen(path, ["rollout.temperature=0.5"])


def test_the_prompts_of_a_run_have_the_day_of_its_beginning(tmp_path):
    """gpt-oss's template writes the day. Resumed on the next day, a run must not read other prompts."""
    model = tmp_path / "model"
    copytree("assets/tiny_gym/policy", model, ignore=ignore_patterns("*.safetensors"))
    given = [f"run.runs_dir={tmp_path / 'runs'}", f"model.path={model}"]
    assert run_folder.with_date(load_config("tiny_moe_cpu", given)).run.date is None
    template = model / "chat_template.jinja"
    template.write_text('Today is {{ strftime_now("%Y-%m-%d") }}.' + template.read_text())
    config = load_config(run_folder.create(run_folder.with_date(load_config("tiny_moe_cpu", given))).config)
    assert config.run.date is not None
    first, other = (ChatTemplate(model, None, day) for day in (config.run.date, datetime.date(2001, 2, 3)))
    messages = first.messages("1+2=")
    assert first.render(messages).startswith(f"Today is {config.run.date:%Y-%m-%d}.")
    assert other.render(messages).startswith("Today is 2001-02-03.")
    chosen = run_folder.with_date(load_config("tiny_moe_cpu", [*given, "run.date=2001-02-03"]))
    assert chosen.run.date == datetime.date(2001, 2, 3)


def test_a_config_that_was_edited_by_hand_is_named(tmp_path):
    given = ["run.runs_dir=r", "train.optimizer.lr=1e-5"]
    config = load_config("tiny_moe_cpu", [*given, f"run.runs_dir={tmp_path}"])
    folder = run_folder.create(config)
    run_folder.reopen(folder.path)  # no process has begun yet

    def started(now):
        history.record(folder.path, after=0, ranks=1, device="CPU", changed={}, config=now.model_dump(mode="json"))

    started(load_config(folder.config))
    whole = folder.config.read_text()
    for key, value, old in (("objective.clip_low", 0.25, "0.1"), ("rollout.temperature", 0.5, "1.0"),
                            ("train.optimizer.lr", 2e-5, "1e-05"), ("run.steps", 7, "")):  # fmt: skip
        now = load_config(folder.config, [f"{key}={value}"])
        folder.config.write_text(dump_config(now))
        with refused(ConfigError, f"{key} = {value:g}", f"{key} = {old}", fault="edited", file=folder.config):
            run_folder.reopen(folder.path)
        folder.config.write_text(whole)
    # a start that dies after it is recorded and before the config is written, and one that does not
    faster = load_config(folder.config, ["train.optimizer.lr=2e-5"])
    started(faster)
    run_folder.reopen(folder.path)
    run_folder.take_over(folder, faster)
    _, config = run_folder.reopen(folder.path)
    assert config.train.optimizer.lr == 2e-5


def test_a_run_of_a_version_with_fewer_keys_was_not_edited(tmp_path):
    folder = run_folder.create(load_config("tiny_moe_cpu", [f"run.runs_dir={tmp_path}"]))
    values = load_config(folder.config).model_dump(mode="json")
    del values["run"]["date"], values["rollout"]["engines"]
    history.record(folder.path, after=0, ranks=1, device="CPU", changed={}, config=values)
    folder.config.write_text(strict_yaml.dump(values))
    run_folder.reopen(folder.path)
    values["rollout"]["temperature"] = 0.5
    folder.config.write_text(strict_yaml.dump(values))
    with refused(ConfigError, "rollout.temperature = 0.5", fault="edited"):
        run_folder.reopen(folder.path)


def test_relative_paths_of_a_resume_mean_the_same_in_every_folder(tmp_path, monkeypatch):
    folder = run_folder.create(load_config("tiny_moe_cpu", [f"run.runs_dir={tmp_path}"]))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    _, config = run_folder.reopen(folder.path, ["rollout.token_file=token", "task.heldout.0.data=mine.jsonl"])
    assert config.rollout.token_file == tmp_path / "token"
    assert config.task.heldout[0].data == str(tmp_path / "mine.jsonl")


def test_a_resume_may_have_other_servers_and_another_cluster(tmp_path):
    """After a node is lost, a run goes on with the others. How its servers record may not change."""
    servers = ["rollout.servers=[http://a:1,http://b:1]", f"rollout.token_file={tmp_path / 'token'}"]
    folder = run_folder.create(load_config("qwen3_30b_a3b", [f"run.runs_dir={tmp_path}", *servers]))
    fewer = ["rollout.servers=[http://c:2]", "cluster.engines=1", "cluster.gpus_per_engine=4", "cluster.gpus=16"]
    _, config = run_folder.reopen(folder.path, [*fewer, "rollout.token_file=/other"])
    cluster = config.cluster
    assert (config.rollout.servers, config.rollout.token_file) == (("http://c:2",), Path("/other"))
    assert (cluster.engines, cluster.gpus_per_engine, cluster.gpus) == (1, 4, 16)
    with refused(ConfigError, "rollout.router_logits_fraction = 0.5", folder=folder.path):
        run_folder.reopen(folder.path, [*fewer, "rollout.router_logits_fraction=0.5"])


def test_what_is_left_of_a_run_that_was_killed_is_waited_for(tmp_path, rank):
    subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({rank.pid}, 9)"])
    with held(RunFolder(tmp_path), first=True):
        assert rank.wait(1) == -9
        # No later run may lock the folder before this one ends, but its own ranks may.
        with held(RunFolder(tmp_path), first=False):
            assert os.path.exists(tmp_path / "run.lock")


def test_an_optimizer_with_another_form_of_main_weights_is_not_taken_over(tmp_path):
    """A checkpoint holds float32 weights whole, or only the 16 bits that the bfloat16 weights lack."""
    aware = "use_precision_aware_optimizer: true"
    halves = f"{{{aware}}}"
    whole = (
        "{}",
        f"{{{aware}, store_param_remainders: false}}",
        f"{{{aware}, optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0}}",
    )
    (tmp_path / "checkpoints/step-000004").mkdir(parents=True)

    def config(passed, *overrides):
        return load_config("tiny_moe_cpu", ["train.dtype=bfloat16", f"train.megatron_optimizer={passed}", *overrides])

    def told(theirs, ours):
        (tmp_path / "config.yaml").write_text(dump_config(config(theirs)))
        start = (f"model.from_run={tmp_path}", "model.from_optimizer=true")
        return run_folder.start_problems(config(ours, *start))

    assert told(halves, halves) == told(whole[0], whole[1]) == told(whole[2], whole[0]) == []
    for form in whole:
        for pair, bits in (((form, halves), (16, 32)), ((halves, form), (32, 16))):
            (problem,) = told(*pair)
            key = "train.megatron_optimizer"
            tells(problem, key=key, got=f"main weights of {bits[0]} bits", expected=(f"{bits[1]} bits", tmp_path))
