"""Routes that are handed over to other trainers: what their own readers make of them is what was recorded."""

import numpy as np
import pytest

from moe_rl.errors import TraceError
from moe_rl.replay.router_audit import row_places
from moe_rl.trace import TraceSpec
from moe_rl.trace.adapters import outgoing
from moe_rl.trace.adapters.envelopes import decode_nemo, decode_sglang, decode_vllm, take_routes

EXPERTS, TOP_K = 300, 4
SPEC = TraceSpec("test", EXPERTS, TOP_K, "dmmhm")
RNG = np.random.default_rng(0)


def recorded(rows, experts=EXPERTS):
    chosen = np.argsort(RNG.random((rows, 3, experts)), -1)[..., :TOP_K]
    return np.sort(chosen).astype(np.uint8 if experts <= 256 else np.uint16)


@pytest.mark.parametrize("experts", [100, 200, 300])
def test_every_envelope_is_read_back_as_it_was_recorded(experts):
    routes, spec = recorded(31, experts), TraceSpec("test", experts, TOP_K, SPEC.layer_map)
    nemo = decode_nemo(outgoing.to_nemo(routes, experts))
    assert len(nemo) == 32 and (nemo[-1] == np.arange(TOP_K)).all()  # NeMo-RL wants a row for every token
    sglang = decode_sglang(outgoing.to_slime(routes, spec.layer_map), layers=5, top_k=TOP_K)
    assert not sglang[:, [0, 3]].any()  # slime looks up a layer by its global number
    prime = outgoing.to_prime_rl(routes, start=7)
    assert prime["start"] == 7
    for sent in (nemo[:-1], sglang, decode_vllm(outgoing.to_skyrl(routes)), decode_vllm(prime)):
        read = take_routes(sent, spec, rows=31, where={})
        assert read.dtype == routes.dtype and (read == routes).all()


@pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "int16"), (299, "int16")])
def test_skyrl_gets_the_narrowest_type_of_each_array(largest, dtype):
    """SkyRL a9564572 knows uint8, int16 and int32, and refuses a wider one than an array's ids need."""
    routes = recorded(9).clip(max=largest)
    routes[0, 0, -1] = largest
    assert routes.dtype == np.uint16
    sent = outgoing.to_skyrl(routes)
    assert sent["dtype"] == dtype and list(sent)[0] == "data"
    assert (decode_vllm(sent) == routes).all()


def as_verl_reads(batch, attention):
    """Take the rows of real tokens, as verl 1dda039b removes padding: by the attention mask."""
    return [rows[mask] for rows, mask in zip(batch, attention, strict=True)]


def test_the_padded_batch_of_verl_has_each_row_at_its_token():
    routes, prompts = [recorded(9), recorded(5)], [4, 2]
    batch = outgoing.to_verl(routes, prompts, prompt_length=6, response_length=8)
    assert batch.shape == (2, 14, 3, TOP_K) and batch.dtype == np.int16
    attention = np.zeros((2, 14), bool)
    for at, (one, prompt) in enumerate(zip(routes, prompts, strict=True)):
        attention[at, 6 - prompt : 6 - prompt + len(one) + 1] = True  # the last token is there, and was not forwarded
    for read, one in zip(as_verl_reads(batch, attention), routes, strict=True):
        assert (read[:-1] == one).all() and not read[-1].any()
    with pytest.raises(TraceError) as error:
        outgoing.to_verl(routes, prompts, prompt_length=6, response_length=4)
    assert error.value.about == {"sequence": 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rows_of_a_rank_are_those_of_its_tokens_and_padding_is_spread(rank):
    routes = [recorded(9), recorded(6)]
    sequence, position = row_places([0, 1], [9, 6], padded_to=24, context=(rank, 2))
    for column, rows in zip((0, 2), outgoing.to_megatron(routes, sequence, position, columns=(0, 2),
                                                           num_experts=EXPERTS), strict=True):  # fmt: skip
        assert rows.shape == (12, TOP_K) and rows.dtype == np.int64
        for row, s, p in zip(rows, sequence, position, strict=True):
            assert s < 0 or (row == routes[s][p, column]).all()
        pads = rows[sequence < 0]
        assert len(pads) >= 2 and np.bincount(pads.reshape(-1)).max() == 1


def test_a_row_beyond_the_record_is_named():
    with pytest.raises(TraceError) as error:
        outgoing.to_megatron([recorded(3)], np.zeros(4, int), np.arange(4), columns=(0,), num_experts=EXPERTS)
    assert error.value.about == {"row": 3, "sequence": 0, "position": 3}
