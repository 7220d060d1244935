"""Tests what `moe-rl doctor` reports for this machine and for invented machines."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from moe_rl import cli
from moe_rl.commands import machine as machine_module
from moe_rl.commands.diagnosis import diagnose, fits, installation_problems, tracker_problems
from moe_rl.commands.doctor import verdict
from moe_rl.commands.machine import (
    ALWAYS,
    APEX,
    CUDA,
    NCCL,
    PARTS,
    TORCH,
    TRACKERS,
    TRANSFORMER_ENGINE,
    VLLM,
    Gpu,
    Machine,
    apex_kind,
    gpus,
    look,
    page,
)
from moe_rl.config.load import load_config
from moe_rl.vllm import patches
from tests.support.refusals import tells

ROOT = Path(__file__).resolve().parents[2]
SERIES = {path.name for path in (ROOT / "patches/vllm/0.32.0").rglob("*.patch")}
CONFIG = ROOT / "configs/tiny_moe_cpu.yaml"
# The versions in the table, for a machine with a GPU and without transformer-engine.
OTHERS = {"Python": "3.12.1", "NCCL": "2.29.7", TRANSFORMER_ENGINE.name: ""}
WHOLE = {part.name: part.tested for part in PARTS} | OTHERS


def made_up(gpus=(), apex="absent", **found):
    return Machine(WHOLE | found, apex, gpus, "patched", {})


@pytest.fixture
def whole_installation(monkeypatch):
    """Replace the installed software by a complete one."""
    monkeypatch.setattr(patches, "problems", lambda capture: [])
    monkeypatch.setattr("moe_rl.commands.diagnosis.found_version", lambda part: WHOLE[part.name])


def test_this_machine_runs_the_demo(capsys, tmp_path):
    """The environment of the tests has the pinned versions."""
    file = tmp_path / "doctor.json"
    assert cli.main(["doctor", "--config", str(CONFIG), "--json", str(file)]) == 0
    said, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "nothing is missing" in said and written["missing"] == []
    found = {part["name"]: (part["found"], part["verdict"]) for part in written["parts"]}
    assert found["torch"] == ("2.13.0", "as run") and found["megatron-core"] == ("0.19.2", "as run")
    assert found["vLLM"] == ("0.32.0", "patched") == (VLLM.tested, written["vllm_state"])
    assert set(written["vllm_patches"].values()) == {"applied"} and written["vllm_patches"].keys() == SERIES


def test_what_is_missing_is_said_and_is_the_status(monkeypatch, capsys):
    fault = "vLLM is not patched: run moe-rl patch --apply"
    monkeypatch.setattr(patches, "problems", lambda capture: [fault] if capture == "patch" else [])
    assert cli.main(["doctor"]) == 2
    assert f"missing: {fault}\n1 missing" in capsys.readouterr().out
    assert cli.main(["doctor", "--config", str(CONFIG), "rollout.capture=worker"]) == 0
    assert cli.main(["doctor", "--config", "no/such.yaml"]) == 2
    assert "no/such.yaml" in capsys.readouterr().err
    assert cli.main(["doctor", "rollout.capture=worker"]) == 2
    assert "nothing to override" in capsys.readouterr().err


def test_what_a_config_names_and_is_not_here_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # not installed
    assert cli.main(["doctor", "--config", "reasoning_gym_cpu"]) == 2
    assert "task.rewards.gym.kind" in capsys.readouterr().out
    absent = [f"model.path={tmp_path}/nowhere", f"task.train.0.data={tmp_path}/nothing.jsonl"]
    assert cli.main(["doctor", "--config", str(CONFIG), *absent, "rollout.capture=worker"]) == 2
    said = capsys.readouterr().out
    assert "missing: model.path" in said and "missing: task.train.0.data" in said and "2 missing" in said


@pytest.mark.parametrize("part", [part for part in ALWAYS if part is not VLLM], ids=lambda part: part.name)
def test_every_part_that_is_needed_is_missed(whole_installation, monkeypatch, part):
    for found in ("", "0.0.1"):
        monkeypatch.setattr(
            "moe_rl.commands.diagnosis.found_version", lambda one, got=found: got if one is part else WHOLE[one.name]
        )
        (message,) = diagnose(made_up()).missing
        tells(message, part=part.name, got=found, expected=part.required)


def test_a_gpu_needs_cuda_and_nccl_and_does_better_with_more(whole_installation):
    gpu = (Gpu("H100", 80 << 30),)
    without, whole = made_up(gpu), made_up(gpu, **{TRANSFORMER_ENGINE.name: "2.9"})
    assert diagnose(whole).missing == diagnose(whole).notes == []
    assert "experts run one by one" in diagnose(without).notes[0] and "torch's" in diagnose(without).notes[0]
    assert "apex's fused one" in diagnose(made_up(gpu, "NVIDIA's")).notes[0]
    for part in (CUDA, NCCL):
        (message,) = diagnose(made_up(gpu, **{part.name: ""})).missing
        tells(message, part=part.name)
        assert diagnose(made_up((), **{part.name: ""})).missing == []
    assert "gloo" in diagnose(made_up()).notes[0]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_asked_for_must_be_there(whole_installation, monkeypatch, name):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    config = load_config(CONFIG, [f"report.trackers=[{name}]"])
    for found, there in (("", False), ("0.0.1", False), (TRACKERS[name].tested, True)):
        versions = {part.name: found for part in TRACKERS.values()} | WHOLE
        monkeypatch.setattr("moe_rl.commands.diagnosis.found_version", lambda part, have=versions: have[part.name])
        messages = list(tracker_problems(config))
        assert messages == diagnose(made_up(), config).missing and len(messages) == (not there)
        for message in messages:
            tells(message, f"'.[{name}]'", key="report.trackers", part=name, got=found)
    assert list(tracker_problems(load_config(CONFIG))) == []


def test_mlflow_needs_an_address(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (message,) = tracker_problems(load_config(CONFIG, ["report.trackers=[mlflow]"]))
    tells(message, "MLFLOW_TRACKING_URI", key="report.trackers")


def test_native_capture_needs_a_gpu(whole_installation):
    config = load_config(CONFIG, ["rollout.capture=native"])
    (message,) = diagnose(made_up(), config).missing
    tells(message, key="rollout.capture")
    assert diagnose(made_up((Gpu("H100", 80 << 30),)), config).missing == []


@pytest.mark.parametrize(
    ("installed", "got"),
    [("", "no transformer-engine"), ("2.2.1", "transformer-engine 2.2.1"), ("2.3.0", None), ("10.0", None)],
)
def test_delayed_gradients_of_weights_need_transformer_engine(whole_installation, monkeypatch, installed, got):
    versions = WHOLE | {TRANSFORMER_ENGINE.name: installed}
    monkeypatch.setattr("moe_rl.commands.diagnosis.found_version", lambda part: versions[part.name])
    asked = ["train.overlap_expert_parallel_comm=true", "train.delay_wgrad_compute=true"]
    assert installation_problems(load_config(CONFIG, asked[:1])) == []
    found = installation_problems(load_config(CONFIG, asked))
    assert len(found) == (got is not None)
    for message in found:
        tells(message, key="train.delay_wgrad_compute", got=got, expected=("transformer-engine 2.3",))


def test_adapters_are_refused_where_transformer_engine_is(whole_installation, monkeypatch):
    config = load_config(CONFIG, ["train.lora.rank=4", "train.lora.alpha=8"])
    assert installation_problems(config) == []
    versions = WHOLE | {TRANSFORMER_ENGINE.name: "2.9.0"}
    monkeypatch.setattr("moe_rl.commands.diagnosis.found_version", lambda part: versions[part.name])
    (message,) = installation_problems(config)
    tells(message, key="train.lora", got="transformer-engine 2.9.0")


def test_a_config_for_a_cluster_needs_its_nodes(whole_installation):
    config = load_config(ROOT / "configs/qwen3_30b_a3b.yaml")

    def missing(*gpus):
        found = diagnose(made_up(gpus), config).missing
        return [
            one for one in found if one.about["key"] not in ("model.path", "task.train.0.data", "task.heldout.0.data")
        ]

    assert [one.about["key"] for one in missing()] == ["cluster.gpus_per_node"]
    h100, small = Gpu("H100", 81559 << 20), Gpu("A100", 40 << 30)
    assert missing(*[h100] * 8) == []
    messages = missing(*[h100] * 6, small)
    tells(messages[0], key="cluster.gpus_per_node", got=7, expected=8)
    tells(messages[1], key="cluster.gpu_memory_gib", got="40.0 GiB", expected="79 GiB")


def write(folder, *files):
    """Write packages that fail the test if they are imported."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("raise SystemExit('imported')")


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ((), "absent"),
        # The package that the registry has under this name: views and models for Pyramid.
        (("apex/__init__.py", "apex/models.py", "apex/views.py", "apex/lib/settings.py"), "unrelated"),
        (("apex/__init__.py", "apex/multi_tensor_apply/__init__.py"), "NVIDIA's, without its CUDA extensions"),
        (("apex/__init__.py", "apex/multi_tensor_apply/__init__.py", "amp_C.py"), "NVIDIA's"),
    ],
)
def test_which_apex_this_is(tmp_path, monkeypatch, whole_installation, files, kind):
    write(tmp_path, *files)
    monkeypatch.syspath_prepend(tmp_path)
    assert apex_kind() == kind
    assert "apex" not in sys.modules and "amp_C" not in sys.modules
    said = [note for note in diagnose(made_up(apex=kind)).notes if note.startswith("apex")]
    assert len(said) == (kind in ("unrelated", "NVIDIA's, without its CUDA extensions"))
    assert verdict(made_up(apex=kind, **{APEX.name: "0.1"}), APEX) == kind


ENGINE = {"transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.2", "transformer-engine-torch": "2.20.2"}
LIBRARIES = ("libtransformer_engine.so", "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so")
IN_WHEELS = [f"transformer_engine/wheel_lib/{file}" for file in LIBRARIES]


@pytest.mark.parametrize(
    ("distributions", "libraries", "fault"),
    [
        ({}, (), ""),
        (ENGINE, IN_WHEELS, ""),
        ({"transformer-engine": "2.21.dev0"}, [f"transformer_engine/{file}" for file in LIBRARIES], ""),  # from source
        ({"transformer-engine": "2.21.dev0"}, LIBRARIES, ""),  # from source, editable
        # pip leaves the torch part out unless it is asked for. The import then dies with FileNotFoundError.
        (ENGINE | {"transformer-engine-torch": ""}, IN_WHEELS[:1], "no transformer_engine_torch*.so"),
        (ENGINE | {"transformer-engine-cu13": ""}, IN_WHEELS[1:], "no libtransformer_engine*.so"),
        (ENGINE | {"transformer-engine-torch": "2.19.0"}, IN_WHEELS, "transformer-engine-torch 2.19.0"),
    ],
)
def test_every_part_of_transformer_engine_must_be_there(
    tmp_path, monkeypatch, whole_installation, distributions, libraries, fault
):
    """Megatron takes only an ImportError for an engine that is not there."""
    write(tmp_path, *(["transformer_engine/__init__.py"] if distributions else []), *libraries)
    for name, version in distributions.items():
        if version:
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    problems = installation_problems()
    assert "transformer_engine" not in sys.modules and len(problems) == bool(fault)
    for problem in problems:
        tells(problem, fault, part=TRANSFORMER_ENGINE.name)


def test_gpus_are_what_the_driver_tells(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA H200, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == (Gpu("NVIDIA H100 80GB HBM3", 81559 << 20), Gpu("NVIDIA H200", 143771 << 20))
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == ()


def test_a_machine_without_vllm(monkeypatch):
    monkeypatch.setattr(machine_module, "found_version", lambda part: "")
    monkeypatch.setattr(patches, "find_vllm", lambda: (_ for _ in ()).throw(patches.PatchError("none")))
    machine = look(PARTS)
    assert machine.vllm_state == "absent"
    assert (verdict(machine, TORCH), verdict(machine, CUDA)) == ("missing", "absent")


def test_versions_with_a_local_label_fit():
    assert fits(TORCH, "2.13.0+cu130") and not fits(TORCH, "2.12.1") and not fits(TORCH, "")


def test_the_docs_show_the_table():
    assert (ROOT / "docs/generated/versions.md").read_text() == page(), "run: make generated"


def test_the_table_says_what_setup_and_the_pinned_requirements_say():
    tree = ast.parse((ROOT / "setup.py").read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE))
    checked = 0
    for part in PARTS:
        for name in part.distributions:
            if part.tested and name in pins:
                assert pins[name] == part.tested, part
                checked += 1
        if part.distributions and part in ALWAYS:
            assert words & {f"{name}{part.required}" for name in part.distributions}, part
    assert checked == len(ALWAYS) - 1
    (python,) = (word for word in words if word.endswith(",<3.13"))  # the smallest install runs on older ones too
    assert ALWAYS[0].required.endswith(",<3.13") and ALWAYS[0].tested in SpecifierSet(python)
    assert "moe-rl = moe_rl.cli:main" in words
