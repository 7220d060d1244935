"""How adapters get their first values. `tests/distributed/test_lora.py` compares the values, in every layout."""

import pytest

from moe_rl.proof.batch import make_checkpoint
from tests.support.adapted import ALPHA, RANK, random_adapters, write_adapters

TARGETS = ("attention", "experts")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=2, experts=8)


@pytest.mark.parametrize(("starts", "times"), [(True, 1), (False, 0)])
def test_the_file_of_the_first_values_is_opened_once(one_rank, checkpoint, tmp_path, monkeypatch, starts, times):
    """Opening it reads the names of all tensors: 37,248 of them for Qwen3-30B-A3B."""
    from moe_rl.megatron import lora
    from moe_rl.megatron.policy import Policy
    from moe_rl.models.hf import read_model
    from moe_rl.proof.cases import Case

    settings, opened, safe_open = {"rank": RANK, "alpha": ALPHA, "targets": TARGETS}, [], lora.safe_open
    if starts:
        settings["start"] = write_adapters(tmp_path / "peft", random_adapters(checkpoint, TARGETS))

    def counted(file, **settings):
        opened.append(file)
        return safe_open(file, **settings)

    monkeypatch.setattr(lora, "safe_open", counted)
    case = Case(1, {}, {"lora": settings})
    policy = Policy(read_model(checkpoint), case.train_config, case.parallel_config, checkpoint, temperature=1.0)
    policy.release()
    assert len(opened) == times
