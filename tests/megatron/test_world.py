"""Tests the process groups of a rank."""

import json
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from tests.megatron.conftest import TIMEOUT_SECONDS


@pytest.mark.usefixtures("one_rank")
def test_every_group_waits_as_long_as_the_ranks_were_told_to():
    """Megatron's own groups would wait 30 minutes, and one of them however long the others wait."""
    groups = list(distributed_c10d._world.pg_map)
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    waits = {group.group_desc: seconds for group, seconds in zip(groups, timeouts, strict=True)}
    assert len(waits) > 10 and set(waits.values()) == {TIMEOUT_SECONDS}, waits


@pytest.mark.parametrize(("gpu", "given"), [(True, {"device_id": torch.device("cuda", 3)}), (False, {})])
def test_ranks_with_gpus_connect_once_and_not_in_pairs(gpu, given, monkeypatch):
    """Without a device, torch makes a communicator for each two ranks that send to each other."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    cuda = mock.patch.multiple(torch.cuda, is_available=lambda: gpu, set_device=mock.DEFAULT)
    with cuda, mock.patch("torch.distributed.init_process_group") as init:
        world.join(timeout_seconds=9)
    assert init.call_args.kwargs == {"timeout": timedelta(seconds=9)} | given


def test_the_record_of_a_hang_has_the_collectives_of_gloo_and_of_nccl(monkeypatch):
    """Each has a recorder of its own. A torch for the CPU alone lacks that of NCCL."""
    assert "gloo" in json.loads(world.begun_collectives()[1]), "what torch itself writes"
    recorders = torch._C._distributed_c10d
    monkeypatch.setattr(recorders, "_dump_fr_trace_json", lambda: b'{"entries": [1]}')
    monkeypatch.setattr(recorders, "_dump_nccl_trace_json", lambda: b'{"entries": [2]}', raising=False)
    assert json.loads(world.begun_collectives()[1]) == {"gloo": {"entries": [1]}, "nccl": {"entries": [2]}}
    monkeypatch.delattr(recorders, "_dump_nccl_trace_json")
    assert json.loads(world.begun_collectives()[1]) == {"gloo": {"entries": [1]}}


def test_an_error_of_another_rank_has_its_type(monkeypatch):
    """Evidence names it, and `moe-rl explain` decides by it."""
    refusal = world._Refusal("TraceError", "a record is damaged", "digest", {"request": "s1"})
    monkeypatch.setattr(world.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(world, "all_reduce", lambda *given: [2.0])
    monkeypatch.setattr(world, "broadcast", lambda *given: refusal)
    with pytest.raises(ReplayError, match="got rank 1: a record is damaged") as caught, world.agreed():
        pass
    assert (caught.value.kind, ReplayError("x").kind, caught.value.everywhere) == ("TraceError", "ReplayError", True)
