"""Tests that every codec returns what it was given, and that damaged input never decodes to invalid sets.

Legend for shapes: T tokens, L layers, K top-k.
"""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from math import ceil, comb, log2

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_rl.errors import TraceError
from moe_rl.trace import codec, enumerative, ranked
from moe_rl.trace.codec import Codec, decode_chunk, encode_chunk
from tests.support.refusals import refused


def id_dtype(num_experts):
    return np.uint8 if num_experts <= 256 else np.uint16


def random_routes(tokens, layers, top_k, num_experts, seed=0, kinds=None):
    """Return distinct ids in random order. `kinds` is the number of sets to choose from; None makes each set anew."""
    rng = np.random.default_rng(seed)
    sets = tokens * layers
    kinds = sets if kinds is None else min(kinds, sets)
    if num_experts <= 512:
        ids = np.argsort(rng.random((kinds, num_experts)), axis=1)[:, :top_k]
    else:
        ids = np.array([rng.choice(num_experts, top_k, replace=False) for _ in range(kinds)]).reshape(kinds, top_k)
    ids = ids[rng.integers(0, kinds, sets)] if kinds < sets else ids
    return ids.astype(id_dtype(num_experts)).reshape(tokens, layers, top_k)


def skewed_routes(tokens, layers, top_k, num_experts, exponent, seed=0):
    """Draw sets without replacement; the i-th most popular expert of a layer has weight i**-exponent.

    Every layer has its own order of popularity.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_experts + 1) ** -float(exponent)
    log_weights = np.log([rng.permutation(weights) for _ in range(layers)])
    noise = -np.log(rng.standard_exponential((tokens, layers, num_experts)))
    return np.argsort(-(log_weights + noise), axis=-1)[..., :top_k].astype(id_dtype(num_experts))


def all_encodings(routes, num_experts):
    """Return the encodings of a chunk by every codec that applies: (codec, keep_order, bytes)."""
    top_k = routes.shape[2]
    ascending = np.sort(routes, axis=-1).reshape(-1, top_k)
    encodings = [(Codec.RAW, False, ascending.tobytes()), (Codec.RAW, True, routes.tobytes())]
    if routes.size:
        given = routes.reshape(-1, top_k)
        encodings.append((Codec.GAP, False, codec._compress(codec._skips(ascending))))
        encodings.append((Codec.ORDERED, True, codec._compress(given)))
    if enumerative.rank_bits(num_experts, top_k) is not None:
        encodings.append((Codec.ENUM, False, enumerative.encode(ascending, num_experts)))
    if routes.size and ranked.applies(num_experts, top_k):
        parts = ranked.encode(routes, ranked.count_experts(routes, num_experts))
        encodings.append((Codec.RANKED, False, codec._compress_blocks(parts)))
    return encodings


def gap_chunk(skips, num_experts):
    """Make a GAP chunk of hand-made skips [T, L, K]."""
    return codec._compress(np.array(skips, id_dtype(num_experts)).reshape(-1, np.shape(skips)[-1]))


def ranked_chunk(levels, skips):
    """Make a RANKED chunk of hand-made levels [L, E] and skips [T, L, K]."""
    planes = np.array(skips, np.uint8).transpose(2, 1, 0)
    return codec._compress_blocks([np.array(levels, np.uint8), np.ascontiguousarray(planes)])


@st.composite
def chunks(draw):
    """(routes [T, L, K], num_experts)."""
    num_experts = draw(st.sampled_from([1, 2, 3, 8, 31, 60, 64, 128, 160, 255, 256, 257, 384, 512, 65536]))
    top_k = draw(st.integers(1, min(num_experts, 12)))
    if num_experts <= 64 and draw(st.booleans()):
        top_k = draw(st.integers(1, num_experts))
    tokens = draw(st.sampled_from([0, 1, 2, 3, 5, 63, 64, 65]))
    layers = draw(st.integers(1, 4))
    kinds = draw(st.sampled_from([None, 1, 3]))
    return random_routes(tokens, layers, top_k, num_experts, draw(st.integers(0, 2**32)), kinds), num_experts


CORNERS = [
    (random_routes(0, 3, 4, 32), 32),
    (random_routes(7, 2, 1, 1), 1),
    (np.array([[[93, 61]]], np.uint8), 128),
    (random_routes(33, 1, 1, 256), 256),
    (random_routes(33, 1, 1, 65536), 65536),
    (np.array([[[65535, 0]], [[0, 65535]], [[65534, 65535]]], np.uint16), 65536),
    (np.array([[[255, 0]], [[0, 255]], [[254, 255]]], np.uint8), 256),
    (random_routes(2, 2, 256, 256), 256),
    (random_routes(2, 1, 300, 300), 300),
    (random_routes(3, 3, 40, 200), 200),
    (random_routes(3, 3, 62, 64), 64),
    (random_routes(3, 3, 4, 65536), 65536),
    # Large enough for several zstd blocks.
    (random_routes(2500, 12, 8, 128), 128),
    (random_routes(1500, 12, 8, 384), 384),
    # Chunks for which RANKED is chosen.
    (skewed_routes(130, 5, 8, 128, 1.5), 128),
    (skewed_routes(500, 2, 8, 256, 1.5), 256),
    (skewed_routes(500, 2, 32, 256, 1.5), 256),
    (skewed_routes(1100, 1, 4, 60, 1.5), 60),
    # Too short to try RANKED, and without two choices in a layer to measure skew.
    (skewed_routes(500, 1, 8, 128, 1.2), 128),
    (random_routes(5, 900, 1, 128), 128),
]


def with_corners(test):
    for corner in CORNERS:
        test = example(corner)(test)
    return test


@with_corners
@settings(max_examples=150, deadline=None)
@given(chunks())
def test_what_goes_in_comes_out(chunk):
    routes, num_experts = chunk
    given_bytes = routes.tobytes()
    for keep_order in (False, True):
        kind, data = encode_chunk(routes, num_experts, keep_order=keep_order)
        assert routes.tobytes() == given_bytes
        again = decode_chunk(kind, memoryview(data), routes.shape, num_experts, keep_order=keep_order)
        expected = routes if keep_order else np.sort(routes, axis=-1)
        assert again.dtype == routes.dtype and again.flags.writeable
        np.testing.assert_array_equal(again, expected)
        # Sets that are already sorted are encoded identically.
        if not keep_order:
            assert encode_chunk(expected, num_experts) == (kind, data)


@with_corners
@settings(max_examples=150, deadline=None)
@given(chunks())
def test_every_codec_round_trips_and_the_smallest_is_taken(chunk):
    routes, num_experts = chunk
    sizes = {False: {}, True: {}}
    for kind, keep_order, data in all_encodings(routes, num_experts):
        again = decode_chunk(kind, data, routes.shape, num_experts, keep_order=keep_order)
        np.testing.assert_array_equal(again, routes if keep_order else np.sort(routes, axis=-1))
        sizes[keep_order][kind] = len(data)
    for keep_order, by_kind in sizes.items():
        kind, data = encode_chunk(routes, num_experts, keep_order=keep_order)
        assert len(data) == by_kind[kind]
        # RANKED is not tried where no saving is expected.
        ranked_size = by_kind.pop(Codec.RANKED, None)
        if kind is Codec.RANKED:
            assert routes.nbytes > 4096 and ranked_size < min(by_kind.values()) * 15 / 16
        # Long chunks may stay with GAP for speed where ENUM saves less than a sixteenth.
        slack = 1 if keep_order or routes.nbytes <= 4096 else 16 / 15
        assert len(data) <= min(by_kind.values()) * slack


@given(st.integers(1, 12).flatmap(lambda k: st.tuples(st.just(k), st.integers(k, 200))), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_ranks_are_those_of_the_definition(sizes, seed):
    top_k, num_experts = sizes
    width = enumerative.rank_bits(num_experts, top_k)
    if comb(num_experts, top_k) >= 2**64:
        assert width is None
        return
    assert width == ceil(log2(comb(num_experts, top_k))) or comb(num_experts, top_k) > 2**52
    ids = np.sort(random_routes(9, 1, top_k, num_experts, seed).reshape(9, top_k), axis=1)
    ranks = [sum(comb(int(c), i + 1) for i, c in enumerate(row)) for row in ids]
    stream = sum(rank << (width * i) for i, rank in enumerate(ranks))
    assert enumerative.encode(ids, num_experts) == stream.to_bytes(ceil(9 * width / 8), "little")


def test_ranks_count_the_sets_in_colexicographic_order():
    sets = np.array(sorted(combinations(range(9), 4), key=lambda ids: ids[::-1]), np.uint8)
    data = enumerative.encode(sets, 9)
    stream, width = int.from_bytes(data, "little"), enumerative.rank_bits(9, 4)
    assert [stream >> (i * width) & (2**width - 1) for i in range(len(sets))] == list(range(comb(9, 4)))


@pytest.mark.parametrize("num_experts, top_k", [(68, 33), (67, 33), (67, 34), (2**16, 4), (2**16, 2**16 - 3)])
def test_ranks_of_nearly_64_bits(num_experts, top_k):
    assert (comb(num_experts, top_k) < 2**64) == (enumerative.rank_bits(num_experts, top_k) is not None)
    if comb(num_experts, top_k) < 2**64:
        # The last set has the largest rank.
        ids = np.stack([np.arange(num_experts - top_k, num_experts), np.arange(top_k)]).astype(id_dtype(num_experts))
        data = enumerative.encode(ids, num_experts)
        rank = int.from_bytes(data, "little") & (2 ** enumerative.rank_bits(num_experts, top_k) - 1)
        assert rank == comb(num_experts, top_k) - 1
        again = decode_chunk(Codec.ENUM, data, (2, 1, top_k), num_experts)
        np.testing.assert_array_equal(again[:, 0], ids)


@pytest.mark.parametrize("width", range(1, 13))
def test_the_sorting_network_sorts(width):
    # 0-1 principle: a network that sorts all sequences of zeros and ones sorts everything.
    rows = np.array(list(product([0, 1], repeat=width)), np.uint8)
    np.testing.assert_array_equal(ranked.sort_sets(rows), np.sort(rows, axis=1))


def test_uniform_8_of_128_takes_at_most_42_5_bits_a_set():
    routes = random_routes(512, 12, 8, 128)
    kind, data = encode_chunk(routes, 128)
    assert kind is Codec.GAP
    assert len(data) * 8 / (512 * 12) <= 42.5


def test_long_chunks_are_enumerative_where_that_saves_more_than_a_sixteenth():
    routes = random_routes(200, 12, 16, 64)
    kind, data = encode_chunk(routes, 64)
    sizes = {kind: len(data) for kind, _, data in all_encodings(routes, 64)}
    assert sizes[Codec.GAP] * 3 / 4 < sizes[Codec.ENUM] < sizes[Codec.GAP] * 15 / 16
    assert (kind, len(data)) == (Codec.ENUM, sizes[Codec.ENUM])


@pytest.mark.parametrize("tokens, num_experts, top_k", [(512, 128, 8), (512, 256, 8), (512, 32, 4), (2048, 128, 8)])
def test_chunks_are_ranked_where_that_saves_more_than_a_sixteenth(tokens, num_experts, top_k):
    seen = set()
    for exponent in (0, 0.3, 0.5, 0.8, 1.2):
        routes = skewed_routes(tokens, 3, top_k, num_experts, exponent)
        kind, data = encode_chunk(routes, num_experts)
        sizes = {kind: len(data) for kind, keep_order, data in all_encodings(routes, num_experts) if not keep_order}
        pays = sizes[Codec.RANKED] < 15 / 16 * sizes[Codec.GAP]
        assert kind is (Codec.RANKED if pays else Codec.GAP)
        assert len(data) == sizes[kind]
        seen.add(kind)
    assert seen == {Codec.GAP, Codec.RANKED}


def test_ranked_routes_of_great_skew_take_a_fifth_less():
    routes = skewed_routes(512, 12, 8, 128, 1)
    kind, data = encode_chunk(routes, 128)
    gap = {kind: len(data) for kind, _, data in all_encodings(routes, 128)}[Codec.GAP]
    assert kind is Codec.RANKED
    assert len(data) < 0.81 * gap


@pytest.mark.parametrize("layers, num_experts", [(1, 255), (2, 128), (3, 128), (256, 256), (257, 256), (2, 65536)])
def test_each_layer_has_its_own_counts(layers, num_experts):
    """The numbers that are counted, one for each expert of each layer, just fit their type or just do not."""
    routes = np.full((600, layers, 2), num_experts - 1, id_dtype(num_experts))
    routes[:, :, 0] = np.arange(layers) % 100
    routes[550:, 0] = [7, 3]
    expected = np.zeros((layers, num_experts), int)
    for layer, ids in enumerate(routes.swapaxes(0, 1)):
        np.add.at(expected[layer], ids, 1)
    np.testing.assert_array_equal(ranked.count_experts(routes, num_experts), expected)
    np.testing.assert_array_equal(ranked.count_experts(routes[:0], num_experts), 0 * expected)


def test_repeated_sets_are_not_ranked_however_skewed():
    """The planes hide repetitions of whole sets, which GAP finds."""
    few = skewed_routes(6, 1, 8, 128, 1.5)
    routes = few[np.random.default_rng(0).integers(0, 6, 1000)]
    sizes = {kind: len(data) for kind, keep_order, data in all_encodings(routes, 128) if not keep_order}
    kind, data = encode_chunk(routes, 128)
    assert kind is Codec.GAP and len(data) < sizes[Codec.RANKED] * 3 / 4


def test_repetitive_routes_shrink_to_a_sixth():
    routes = random_routes(512, 1, 8, 128, kinds=8)
    for keep_order in (False, True):
        assert len(encode_chunk(routes, 128, keep_order=keep_order)[1]) < routes.nbytes / 6


def test_short_chunks_take_their_information_content():
    for tokens, layers, top_k, num_experts in [(5, 8, 4, 32), (1, 8, 4, 32), (1, 48, 8, 128), (3, 12, 8, 256)]:
        routes = random_routes(tokens, layers, top_k, num_experts)
        _, data = encode_chunk(routes, num_experts)
        assert len(data) <= ceil(tokens * layers * ceil(log2(comb(num_experts, top_k))) / 8)
    assert len(encode_chunk(random_routes(5, 8, 4, 32), 32)[1]) <= 80
    assert len(encode_chunk(random_routes(5, 8, 4, 32), 32, keep_order=True)[1]) <= 5 * 8 * 4


def test_ids_that_say_nothing_cost_nothing():
    assert encode_chunk(random_routes(100, 4, 1, 1), 1) == (Codec.ENUM, b"")
    assert encode_chunk(random_routes(0, 4, 8, 128), 128) == (Codec.RAW, b"")


def test_decodes_into_a_part_of_an_array():
    routes = random_routes(20, 3, 8, 128)
    whole = np.full((30, 9, 8), 255, np.uint8)
    for kind, keep_order, data in all_encodings(routes, 128):
        whole[:] = 255
        part = whole[5:25, 3:6]
        assert decode_chunk(kind, data, routes.shape, 128, keep_order=keep_order, out=part) is part
        np.testing.assert_array_equal(whole[5:25, 3:6], routes if keep_order else np.sort(routes, axis=-1))
        assert (whole == 255).sum() == whole.size - routes.size


@pytest.mark.parametrize("bad", [np.empty((20, 3, 8), np.uint16), np.empty((20, 8, 3), np.uint8)])
def test_an_array_that_does_not_fit_is_refused(bad):
    routes = random_routes(20, 3, 8, 128)
    with refused(TraceError, fault="array"):
        decode_chunk(*encode_chunk(routes, 128), routes.shape, 128, out=bad)


def test_threads_do_not_disturb_each_other():
    chunks = [random_routes(1500, 12, 8, 128, 0), *(skewed_routes(512, 12, 8, 128, 1, seed) for seed in range(3))] * 20

    def round_trip(routes):
        return decode_chunk(*encode_chunk(routes, 128), routes.shape, 128)

    with ThreadPoolExecutor(4) as pool:
        for routes, again in zip(chunks, pool.map(round_trip, chunks), strict=True):
            np.testing.assert_array_equal(again, np.sort(routes, axis=-1))


@pytest.mark.parametrize(
    "routes, num_experts, facts",
    [
        ([[[3, 5, 3]]], 32, {"fault": "expert order", "token": 0, "layer": 0}),
        ([[[0, 1, 2], [0, 7, 0]]], 32, {"fault": "expert order", "token": 0, "layer": 1}),
        ([[[0, 1, 2]], [[0, 7, 32]]], 32, {"fault": "no expert", "token": 1, "layer": 0}),
        ([[[0, 255, 255]]], 256, {"fault": "expert order"}),
        ([[[65535, 65535]]], 65536, {"fault": "expert order"}),
        ([[0, 1, 2]], 32, {"fault": "shape"}),
        ([[[0, 1, 2]]], 2, {"fault": "shape"}),
        ([[[0, 1, 2]]], 65537, {"fault": "shape"}),
    ],
)
@pytest.mark.parametrize("keep_order", [False, True])
def test_routes_that_are_no_sets_are_not_encoded(routes, num_experts, facts, keep_order):
    with refused(TraceError, **facts):
        encode_chunk(np.array(routes, id_dtype(num_experts)), num_experts, keep_order=keep_order)


def test_routes_of_another_dtype_are_not_encoded():
    for dtype, num_experts in [(np.int32, 128), (np.uint16, 128), (np.uint8, 257)]:
        with refused(TraceError, fault="dtype"):
            encode_chunk(np.array([[[0, 1]]], dtype), num_experts)


@pytest.mark.parametrize("num_experts", [128, 384])
def test_wrong_sizes_and_wrong_codecs_are_refused(num_experts):
    routes = random_routes(9, 3, 4, num_experts)
    encodings = all_encodings(routes, num_experts)
    assert {kind for kind, _, _ in encodings} == set(Codec) - (set() if num_experts <= 256 else {Codec.RANKED})
    for kind, keep_order, data in encodings:
        for damaged in (data[:-1], data + b"\0", b"", data + data, data[: len(data) // 2]):
            with refused(TraceError, fault={"size", "compression"}):
                decode_chunk(kind, damaged, routes.shape, num_experts, keep_order=keep_order)
        for shape in ((8, 3, 4), (10, 3, 4), (0, 3, 4), (9, 3, 5)):
            with pytest.raises(TraceError):
                decode_chunk(kind, data, shape, num_experts, keep_order=keep_order)
        if kind is not Codec.RAW:
            with refused(TraceError, fault="codec"):
                decode_chunk(kind, data, routes.shape, num_experts, keep_order=not keep_order)
    for kind in (-1, 5, 255):
        with refused(TraceError, fault="codec"):
            decode_chunk(kind, b"", routes.shape, num_experts)
    with refused(TraceError, fault="no code"):
        decode_chunk(Codec.ENUM, b"", (1, 1, 10), 512)
    for top_k, experts in ((8, 257), (33, 256)):
        with refused(TraceError, fault="no code"):
            decode_chunk(Codec.RANKED, b"", (1, 1, top_k), experts)
    for shape in ((1, 1), (1, -1, 2), (1, 1, 0), (1, 1, 3)):
        with refused(TraceError, fault="shape"):
            decode_chunk(Codec.RAW, b"", shape, 2)


@pytest.mark.parametrize(
    "ids, num_experts, keep_order, facts",
    [
        ([[0, 1], [2, 32]], 32, False, {"fault": "no expert", "token": 1, "layer": 0}),
        ([[0, 1], [2, 32]], 32, True, {"fault": "no expert"}),
        ([[0, 1], [2, 2]], 32, False, {"fault": "expert order"}),
        ([[0, 1], [2, 2]], 32, True, {"fault": "expert order"}),
        ([[0, 1], [3, 2]], 32, False, {"fault": "expert order"}),
        ([[0, 1], [2, 300]], 300, False, {"fault": "no expert"}),
    ],
)
def test_raw_and_ordered_ids_that_are_no_sets_are_refused(ids, num_experts, keep_order, facts):
    ids = np.array(ids, id_dtype(num_experts))
    with refused(TraceError, **facts):
        decode_chunk(Codec.RAW, ids.tobytes(), (2, 1, 2), num_experts, keep_order=keep_order)
    if keep_order:
        with refused(TraceError, **facts):
            decode_chunk(Codec.ORDERED, codec._compress(ids), (2, 1, 2), num_experts, keep_order=True)


@pytest.mark.parametrize(
    "skips, num_experts",
    [
        ([128, 0], 128),
        ([0, 127], 128),
        # Sums that wrap past 2**8 or 2**16 into range, for K with and without the one-multiplication path.
        ([100, 200], 128),
        ([200, 100, 0], 128),
        ([0, 255], 256),
        ([0, 255, 0], 256),
        ([127, 127, 127, 127, 0, 0, 0, 0], 128),
        ([0, 255, 0, 0, 0, 0, 0, 0], 128),
        ([250, 250, 250, 250, 250, 250, 250, 250], 128),
        ([60000, 6000], 65536),
        ([0, 65535], 65536),
        ([0, 65535, 0, 0, 0, 0, 0, 0], 384),
        ([383, 0], 384),
    ],
)
def test_skips_that_leave_the_experts_are_refused(skips, num_experts):
    shape = (2, 1, len(skips))
    fine = [0] * len(skips)
    decode_chunk(Codec.GAP, gap_chunk([fine, fine], num_experts), shape, num_experts)
    with refused(TraceError, token=1, layer=0):
        decode_chunk(Codec.GAP, gap_chunk([fine, skips], num_experts), shape, num_experts)


@given(st.lists(st.lists(st.integers(0, 255), min_size=4, max_size=4), min_size=1, max_size=4), st.data())
@settings(deadline=None)
def test_skips_are_refused_exactly_when_they_leave_the_experts(skips, data):
    num_experts = data.draw(st.sampled_from([8, 128, 200, 256]))
    top_k = data.draw(st.sampled_from([3, 4]))
    skips = np.minimum(np.array(skips)[:, :top_k], num_experts - 1)
    ids = np.cumsum(skips, axis=1) + np.arange(top_k)
    chunk, shape = gap_chunk(skips, num_experts), (len(skips), 1, top_k)
    if ids.max() < num_experts:
        np.testing.assert_array_equal(decode_chunk(Codec.GAP, chunk, shape, num_experts)[:, 0], ids)
    else:
        with pytest.raises(TraceError):
            decode_chunk(Codec.GAP, chunk, shape, num_experts)


def test_a_ranked_chunk_of_stored_bytes():
    """Decode blocks that zstd stored uncompressed, as docs/reference/trace_format.md describes: 2 tokens, 2 layers, K
    2, E 4.
    """

    def block(content, last):
        return (last | len(content) << 3).to_bytes(3, "little") + bytes(content)

    # Layer 0 numbers its experts 2 3 0 1, layer 1 3 0 1 2.
    levels = [1, 1, 0, 0] + [7, 7, 255, 0]
    # Layer 0: {0, 1}, {1, 3}; layer 1: {0, 3}, {2, 3}.
    first, second = [0, 1] + [0, 2], [0, 1] + [2, 0]
    data = block(levels, 0) + block(first, 0) + block(second, 1)
    routes = decode_chunk(Codec.RANKED, data, (2, 2, 2), 4)
    np.testing.assert_array_equal(routes, [[[2, 3], [2, 3]], [[1, 3], [1, 2]]])


def ranked_by_the_book(levels, skips):
    """Decode a RANKED chunk one set at a time; None if a set is invalid."""
    routes = np.empty(np.shape(skips), np.uint8)
    for t, layer in np.ndindex(routes.shape[:2]):
        order = sorted(range(len(levels[layer])), key=lambda expert: (levels[layer][expert], expert))
        numbers = np.cumsum(skips[t][layer]) + np.arange(routes.shape[2])
        if numbers[-1] >= len(order):
            return None
        routes[t, layer] = sorted(order[number] for number in numbers)
    return routes


@given(st.data())
@settings(deadline=None)
def test_any_bytes_are_a_ranked_chunk_or_refused(data):
    num_experts = data.draw(st.sampled_from([1, 5, 200, 256]))
    tokens, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    top_k = data.draw(st.integers(1, min(num_experts, 4)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    levels = rng.integers(0, data.draw(st.sampled_from([1, 3, 256])), (layers, num_experts))
    # Skips of any size, so that sums wrap past 255.
    skips = rng.integers(0, data.draw(st.sampled_from([1, 2, 60, 256])), (tokens, layers, top_k))
    chunk, expected = ranked_chunk(levels, skips), ranked_by_the_book(levels, skips)
    if expected is None:
        with refused(TraceError, fault="no set"):
            decode_chunk(Codec.RANKED, chunk, skips.shape, num_experts)
    else:
        np.testing.assert_array_equal(decode_chunk(Codec.RANKED, chunk, skips.shape, num_experts), expected)


@pytest.mark.parametrize("skips", [[128, 0], [127, 0], [0, 127], [0, 255], [100, 200], [200, 100]])
def test_numbers_that_leave_the_experts_are_refused(skips):
    levels, fine = np.zeros((2, 128)), [0, 0]
    decode_chunk(Codec.RANKED, ranked_chunk(levels, [[fine, fine], [fine, [0, 126]]]), (2, 2, 2), 128)
    with refused(TraceError, fault="no set", token=0, layer=1):
        decode_chunk(Codec.RANKED, ranked_chunk(levels, [[fine, skips], [fine, fine]]), (2, 2, 2), 128)


def test_ranks_of_no_set_and_bits_after_the_last_rank_are_refused():
    # C(32, 4) = 35960 in 16 bits; C(8, 3) = 56 in 6 bits, two of which leave 4 bits.
    decode_chunk(Codec.ENUM, (35959).to_bytes(2, "little"), (1, 1, 4), 32)
    with refused(TraceError, fault="no set", set=0):
        decode_chunk(Codec.ENUM, (35960).to_bytes(2, "little"), (1, 1, 4), 32)
    decode_chunk(Codec.ENUM, (55 << 6 | 55).to_bytes(2, "little"), (2, 1, 3), 8)
    with refused(TraceError, fault="bits left"):
        decode_chunk(Codec.ENUM, (1 << 12).to_bytes(2, "little"), (2, 1, 3), 8)


def test_a_zip_bomb_costs_no_memory():
    size = 1 << 26
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))
    bomb = frame[6:]
    assert len(bomb) < size / 1000 and zstandard.ZstdDecompressor().decompressobj().decompress(frame) == bytes(size)
    whole_frame = zstandard.ZstdCompressor().compress(bytes(size))
    tracemalloc.start()
    try:
        for data in (bomb, whole_frame):
            for kind, keep_order in ((Codec.GAP, False), (Codec.RANKED, False), (Codec.ORDERED, True)):
                with refused(TraceError, fault="compression"):
                    decode_chunk(kind, data, (16, 4, 8), 128, keep_order=keep_order)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def check_error_or_sets(kind, data, shape, num_experts, keep_order):
    """Return True if decoding is refused; otherwise check that the result consists of valid sets."""
    try:
        routes = decode_chunk(kind, data, shape, num_experts, keep_order=keep_order)
    except TraceError:
        return True
    ascending = np.sort(routes, axis=-1) if keep_order else routes
    assert routes.shape == shape and routes.max(initial=0) < num_experts
    assert (np.diff(ascending.astype(int), axis=-1) > 0).all()
    return False


@pytest.mark.parametrize("num_experts, top_k", [(128, 8), (200, 8), (60, 3), (384, 8)])
def test_no_flipped_bit_yields_anything_but_sets(num_experts, top_k):
    routes = random_routes(12, 2, top_k, num_experts)
    refused = 0
    for kind, keep_order, data in all_encodings(routes, num_experts):
        for bit in range(len(data) * 8):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            refused += check_error_or_sets(kind, bytes(damaged), routes.shape, num_experts, keep_order)
    assert refused > 100


@given(st.sampled_from(list(Codec)), st.booleans(), st.binary(max_size=80), st.integers(0, 5), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_yield_an_error_or_sets(kind, keep_order, data, tokens, top_k):
    for num_experts in (16, 256, 300):
        check_error_or_sets(kind, data, (tokens, 2, top_k), num_experts, keep_order)
