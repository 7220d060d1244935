"""What outlives a step, when ranks share tensors: the weights that the sampler gets, the reference, a checkpoint.

Checkpoints of one layout are loaded by others. What makes a checkpoint is compared whole: a layout that loads one and
saves it again must write the same names and bits, main weights and Adam's moments included.
"""

import functools
import json
import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.layout import make_layout
from moe_rl.config.training import OptimizerConfig, TrainConfig
from moe_rl.megatron import unpickling
from moe_rl.models.hf import read_model
from moe_rl.planning.memory import checkpoint_copy_bytes
from moe_rl.planning.parameters import chunk_buffers
from moe_rl.proof.matrix import largest, merged
from tests.distributed.jobs import state
from tests.distributed.jobs.state import AGAIN, BUCKET, DAMAGES, FILES, LAYOUTS, ONE, SAVER, STEP, UPDATES

OTHERS = [name for name in LAYOUTS if name != SAVER]
USUAL = [SAVER, "begins", "zeroed", "EP2 router", "EP2", "TP2-EP2 shared_memory", "EP2 from two", "DP3 from gathered"]
WAYS = ["disk", "shared_memory", "broadcast", "broadcast_by_1"]
# {what is seen: (its action in jobs/state.py, layout, precision, arguments)}
ACTIONS = {
    "begins": ("begin", SAVER, "float32", "two"),
    "bfloat16 begins": ("begin", SAVER, "bfloat16", "two-bfloat16"),
    "broken": ("broken_writers", SAVER, "float32", "two"),
    "refusals": ("refusals", SAVER, "float32", "two"),
    "skips": ("skips", "EP2", "bfloat16"),
    "started": ("started", "EP2", "float32", "two", True),
    "started by weights": ("started", "EP2", "bfloat16", "two-bfloat16", False),
    "exported": ("exported", SAVER, "float32", "two"),
    "pieces": ("pieces_read", "EP2", "float32", "EP2 from two"),
    "pieces elsewhere": ("pieces_read", "PP2-VPP2", "float32", "EP2 from two"),
    "without moments": ("without_moments", "EP2", "float32", "two"),
    # a rank whose slice of the distributed optimizer has elements of that router
    "EP2 router": ("router_gradients", "EP2", "float32", 1),
    "EP2 router bfloat16": ("router_gradients", "EP2", "bfloat16", 1),
    "DP3 router": ("router_gradients", "DP3", "float32", 2),
    "DP3 router bfloat16 sums": ("router_gradients", "DP3", "bfloat16 sums", 2),
    "zeroed": ("zeroed", "EP2", "float32", "two", 1, "exp_avg"),
    "zeroed bfloat16": ("zeroed", SAVER, "bfloat16", "two-bfloat16", 0, "exp_avg_sq"),
    "DP3 zeroed": ("zeroed", "DP3", "float32", "two", 2, "exp_avg_sq"),
    "one zeroed": ("zeroed", "one", "float32", "two", 0, "exp_avg"),
    # three ranks with the whole model each, and a third of the optimizer's state
    "DP3": ("resume", "DP3", "float32", "two", "DP3 from two"),
    "DP3 seeded": ("seeded", "DP3", "float32"),
    "DP3 gathered": ("gathered", "DP3", "float32", "two", "gathered"),
    "DP3 from gathered": ("resume", "DP3", "float32", "gathered", "DP3 from gathered"),
    "copied to write float32": ("copied_to_write", "DP3", "float32", "two"),
    "copied to write bfloat16": ("copied_to_write", "DP3", "bfloat16", "two-bfloat16"),
    # on one rank
    "one begins": ("begin", "one", "float32", "one"),
    "one": ("resume", "one", "float32", "two"),
    "one seeded": ("seeded", "one", "float32"),
    "stale": ("stale", "one", "float32"),
    "broken metadata": ("broken_metadata", "one", "float32"),
    "EP2 from one": ("resume", "EP2", "float32", "one", "EP2 from one"),
}
# {checkpoint: whose action writes it}
WRITES = {"two": "begins", "two-bfloat16": "bfloat16 begins", "one": "one begins", "EP2 from one": "EP2 from one"}
WRITES |= {"DP3 from two": "DP3", "gathered": "DP3 gathered", "DP3 from gathered": "DP3 from gathered"}
for one in LAYOUTS:
    ACTIONS |= {
        one: ("resume", one, "float32", "two", f"{one} from two"),
        f"{one} copied": ("copy", one, "bfloat16", "two-bfloat16", f"{one} from two-bfloat16"),
        f"{one} again": ("resume", one, "float32", f"{one} from two"),
        f"{one} scored": ("scored", one, "float32", "two"),
        f"{one} scored bfloat16": ("scored", one, "float32", "two-bfloat16"),
        f"{one} sent": ("send", one, "float32"),
        f"{one} reference": ("reference", one, "float32"),
        f"{one} seeded": ("seeded", one, "float32"),
        **{f"{one} {way}": ("streamed", one, "float32", way) for way in WAYS},
        f"{one} handed": ("handed", one, "float32"),
    }
    WRITES |= {f"{one} from two": one, f"{one} from two-bfloat16": f"{one} copied"}


class Seen:
    """seen(a key of ACTIONS) -> what each rank saw. An action runs once, behind that which writes what it loads."""

    def __init__(self, on_ranks, source, folder):
        self.on_ranks, self.source, self.folder = on_ranks, source, folder
        self.found, self.unpickled = {}, set()

    def __call__(self, key):
        if key not in self.found:
            action, layout, dtype, *arguments = ACTIONS[key]
            if arguments and arguments[0] in WRITES and action != "begin":
                self.written(arguments[0])
            number, parallel = {"one": (1, ONE), "DP3": (3, ONE)}.get(layout) or (2, LAYOUTS[layout])
            told = self.on_ranks(number, state.run, action, self.source, self.folder, parallel, dtype, *arguments)
            self.found[key] = [found for found, _ in told]
            self.unpickled.update(name for _, names in told for name in names)
        return self.found[key]

    def written(self, name):
        """The folder of a checkpoint."""
        self(WRITES[name])
        return self.folder / name


@pytest.fixture(scope="module")
def seen(on_ranks, checkpoint, tmp_path_factory):
    return Seen(on_ranks, checkpoint, tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def whole(seen):
    """whole(name) -> every tensor of a checkpoint, put together from all ranks' files."""

    @functools.cache
    def read(name):
        folder = seen.written(name)
        reader = dcp.FileSystemReader(folder / f"step-{STEP:06d}")
        entries = reader.read_metadata().state_dict_metadata.items()
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return read


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
    return True


def same(ours, theirs):
    """Whether two of what the worker's `held` returns are equal, bit for bit; says where they are not."""
    assert ours.keys() == theirs.keys()
    tensors = {name for name, value in ours.items() if torch.is_tensor(value)}
    different = [name for name in tensors if not torch.equal(ours[name], theirs[name])]
    different += [name for name in ours.keys() - tensors if ours[name] != theirs[name]]
    assert not different
    return True


@pytest.mark.parametrize(
    "layout, writers",
    [
        ("EP2", 2),  # rank 0 writes everything but the experts of rank 1
        ("TP2-EP2", 2),
        ("TP2-ETP2", 1),  # rank 0 collects every matrix
        ("PP2-VPP2", 2),  # each stage writes its layers
    ],
)
def test_the_sampler_and_the_reference_get_the_weights(checkpoint, seen, reference, layout, writers):
    """The checkpoint that the ranks cut up, whole and bit for bit."""
    sent, wrote = seen(f"{layout} sent")[0]
    assert equal(sent, load_file(checkpoint / "model.safetensors"))
    assert wrote == [writers] and not list((seen.folder / "parts").iterdir())
    logprobs = reference(forced=False).logprobs
    assert largest(merged(seen(f"{layout} reference"), "logprobs"), logprobs) < 2e-5


@pytest.mark.parametrize("case", [f"{layout} {way}" for layout in LAYOUTS for way in WAYS])
def test_weights_leave_in_buckets_and_a_rank_holds_no_more_than_these(checkpoint, seen, case):
    """Also a rank of many: EP2 and PP2 ranks have half the model to send, of TP2 ETP2 one has all of it."""
    whole, (layout, way) = load_file(checkpoint / "model.safetensors"), case.split()
    (sent, places), _ = seen(case)[0]
    assert equal(sent, whole)
    total, largest_tensor = (f(t.nbytes for t in whole.values()) for f in (sum, max))
    # files, rounds with a segment of each rank, or vLLM's buckets, which the tensor that is too much closes
    pieces = sum(places) if way == "disk" else len(places)
    senders = 2 if way != "disk" and layout != "TP2-ETP2" else 1
    assert pieces * senders >= total // (BUCKET + largest_tensor) >= 13
    for _, (tensors, memory) in seen(case):
        if way == "disk":
            assert BUCKET // 2 < tensors <= BUCKET + 2 * largest_tensor or (tensors == 0 and layout == "TP2-ETP2")
        else:  # a tensor at a time, into one segment; or into a bucket, while the one before is sent
            assert tensors <= 2 * largest_tensor
            most = BUCKET + 64 * len(whole) if way == "shared_memory" else 2 * max(BUCKET, largest_tensor)
            assert BUCKET // 2 < memory <= most or (memory == 0 and layout == "TP2-ETP2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_engine_beside_the_ranks_gets_all_weights_through_the_buffer_of_its_rank(checkpoint, seen, layout):
    whole = load_file(checkpoint / "model.safetensors")
    engines, told, intact = seen(f"{layout} handed")[0]
    total, largest_tensor = (f(t.nbytes for t in whole.values()) for f in (sum, max))
    for weights, parts in engines:
        assert equal(weights, whole) and parts >= total // (BUCKET + 2 * largest_tensor) >= 10
    assert "got other weights than were sent" in told and intact == [True, False]


@pytest.mark.long
def test_weights_of_before_the_update_are_refused_as_stale(seen):
    (stale,) = seen("stale")
    (told,) = stale["told"]
    assert f"(version 3): got {stale['moved']} of " in told and ": stale, what it was in version 2; " in told
    assert stale["held"] == [2, 3] and stale["moved"] > 200
    # woken for the weights first, for the KV cache when they are there
    assert [part for part, _ in stale["woken"]] == ["weights", "kv_cache"] * 2 + ["weights"] + ["weights", "kv_cache"]
    assert [parts for _, parts in stale["woken"][:4]] == [0, 1, 1, 2]


@pytest.mark.parametrize(("case", "resumed"), [("begins", SAVER)] + [(name, f"{name} again") for name in AGAIN])
def test_the_same_layout_goes_on_bit_for_bit(seen, case, resumed):
    for before, after in zip(seen(case), seen(resumed), strict=True):
        assert before["norms"] == after["norms"] and before["norms"][0] != before["norms"][1]
        assert equal(before["final"], after["final"])


def test_every_random_stream_goes_on(seen):
    for before, after in zip(seen("begins"), seen(SAVER), strict=True):
        assert torch.equal(before["drawn"], after["drawn"])
        # not what another layout begins with
        assert not any(torch.equal(before["drawn"], one) for name in LAYOUTS for one in seen(f"{name} seeded"))


def test_it_is_written_behind_the_run(seen):
    """Held back until two updates had changed everything: what it holds is proven by those that go on from it."""
    for rank in seen("begins"):
        assert (rank["published early"], rank["pending"]) == (False, (STEP, []))


def test_it_is_published_by_itself_when_all_its_files_are_whole(seen):
    """The run may hang in its next sampling: nobody asks. What the ranks agree on afterwards is the same for all."""
    for rank in seen("begins"):
        assert rank["published by itself"] and rank["published"] == (True, STEP)


def test_weights_exported_behind_the_run_are_those_of_the_checkpoint_to_the_byte(seen):
    """They were held back until two updates had changed everything."""
    (theirs, again), ours = seen("exported"), seen.folder / "two export" / checkpoints.name_of(STEP)
    assert theirs == again and [rank["exported"] for rank in seen("begins")] == [(True, STEP)] * 2
    written = {path.name: path.read_bytes() for path in ours.iterdir()}
    assert written == {path.name: path.read_bytes() for path in theirs.iterdir()}
    assert sum(name.endswith(".safetensors") for name in written) == 2 and "config.json" in written
    assert equal({n: t for file in ours.glob("*.safetensors") for n, t in load_file(file).items()},
                 merged(seen("begins"), "weights"))  # fmt: skip
    # what is there is not written again
    assert [rank["again"] for rank in seen("begins")] == [None, None]


def test_an_export_that_fails_is_told_on_all_ranks_with_the_checkpoint_to_go_on_from(seen):
    (told,), again = (rank["exporting"] for rank in seen("broken"))
    assert [told] == again and "exported weights could not be written" in told
    assert f"broken export/step-{STEP:06d}): got rank 1: the disk is full (OSError: " in told
    assert f"go on after step {STEP} with --resume " in told and "rank 0: " not in told
    assert [path.name for path in (seen.folder / "broken export").iterdir()] == [f".step-{STEP:06d}.tmp"]


def test_a_writer_that_fails_or_dies_is_named_on_all_ranks(seen):
    told = [rank["told"] for rank in seen("broken")]
    assert told[0] == told[1] and len(told[0]) == 3 and all(rank["witness"] for rank in seen("broken"))
    full = "the disk is full (OSError: [Errno 28] No space left on device, "
    reasons = (f"rank 1: {full}", "rank 1: SystemExit: killed", f"rank 0: {full}")
    for message, reason in zip(told[0], reasons, strict=True):
        assert f"broken/step-{STEP + 1:06d}): got {reason}" in message and ("bytes free" in message) == (full in reason)
        assert f". Fix the cause, then go on after step {STEP} with --resume " in message
    assert seen("broken")[0]["left"] == [STEP]


@pytest.mark.long
def test_metadata_that_cannot_be_written_is_told_and_the_folder_gets_no_name(seen):
    (broken,) = seen("broken metadata")
    assert broken["witness"] and broken["left"] == [f".step-{STEP:06d}.tmp"]
    (told,) = broken["told"]
    assert "rank 0: the disk is full (OSError: [Errno 28] No space left on device, " in told
    assert "begin the run again in its folder with --resume" in told and "--step 0" in told


CROSSINGS = [("begins", name) for name in (*OTHERS, "DP3", "one")] + [("one begins", "EP2 from one")]


@pytest.mark.parametrize("saved, case", CROSSINGS)
def test_another_layout_goes_on(seen, saved, case):
    writers, readers = seen(saved), seen(case)
    assert equal(merged(writers, "weights"), merged(readers, "weights"))
    for reader in readers:
        assert reader["updates"] == UPDATES and reader["state"]["cursor"] == 5
        assert reader["norms"] == pytest.approx(writers[0]["norms"], rel=1e-5)
    # the streams of these ranks were never saved: they are those of the seed and the step
    begun = seen(f"{case.removesuffix(' from one')} seeded")
    assert all(torch.equal(reader["drawn"], drawn) for reader, drawn in zip(readers, begun, strict=True))


@pytest.mark.parametrize("case, loaded", [("begins", "scored"), ("bfloat16 begins", "scored bfloat16")])
def test_weights_alone_load_in_another_layout_and_precision(seen, case, loaded):
    """A float32 policy gets the weights that a bfloat16 one computed with. Their digest knows no layout."""
    digests = set()
    for name in AGAIN:
        readers = seen(f"{name} {loaded}")
        assert equal(merged(seen(case), "weights"), merged(readers, "weights"))
        assert all(reader["updates"] == UPDATES for reader in readers)
        digests |= {reader["digest"] for reader in readers}
    assert len(digests) == 1


def test_a_new_run_starts_from_weights_and_optimizer_of_another_layout(seen):
    """It goes on as the other would have, and counts from 0."""
    writers, readers = seen("begins"), seen("started")
    assert equal(merged(writers, "weights"), merged(readers, "weights"))
    for reader in readers:
        assert reader["updates"] == 0 and reader["moves"] == 1 and reader["lr"] == 1e-3
        assert reader["norms"] == pytest.approx(writers[0]["norms"], rel=1e-5)


@pytest.mark.long
def test_a_new_run_starts_from_weights_alone(seen):
    writers, readers = seen("bfloat16 begins"), seen("started by weights")
    assert equal(merged(writers, "weights"), merged(readers, "weights"))
    for reader in readers:
        assert reader["norms"][0] == pytest.approx(writers[0]["norms"][0], rel=1e-2)
        assert reader["norms"][1] != pytest.approx(writers[0]["norms"][1], rel=1e-3)  # no moments


@pytest.mark.long
def test_the_digest_tells_weights_apart(seen):
    assert seen(f"{AGAIN[0]} scored")[0]["digest"] != seen(f"{AGAIN[0]} scored bfloat16")[0]["digest"]


@pytest.mark.long
def test_lost_moments_would_be_noticed(seen):
    straight, without = seen("begins")[0]["norms"], seen("without moments")[0]
    assert without[0] == pytest.approx(straight[0], rel=1e-5)
    assert without[1] != pytest.approx(straight[1], rel=1e-2)


@pytest.mark.parametrize("case", ["EP2 router", "EP2 router bfloat16", "DP3 router", "DP3 router bfloat16 sums"])
def test_a_routers_gradient_that_one_rank_loses_is_named(seen, case):
    for before, behind, nowhere in seen(case):
        for told in (before, behind):
            assert "a rank's part of a router's gradient is lost (layer " in told and "CHANGED" not in told, told
        assert "got none: layer" in before and float(nowhere) > 0


@pytest.mark.parametrize(
    "case, moment, rank",
    [
        ("zeroed", "exp_avg", 1),
        ("zeroed bfloat16", "exp_avg_sq", 0),
        ("DP3 zeroed", "exp_avg_sq", 2),
        ("one zeroed", "exp_avg", 0),
    ],
)
def test_moments_that_one_rank_loses_behind_the_checkpoint_are_named(seen, case, moment, rank):
    for sound, planted in seen(case):
        assert sound == ""
        assert f"got other {moment}, only zeros on rank {rank}," in planted


@pytest.mark.parametrize(
    "saved, case",
    [("two", f"{name} from two") for name in OTHERS]
    + [("two-bfloat16", f"{name} from two-bfloat16") for name in OTHERS]
    + [("one", "EP2 from one"), ("two", "DP3 from two"), ("gathered", "DP3 from gathered")],
)
def test_a_layout_writes_the_checkpoint_it_read(whole, saved, case):
    before, after = whole(saved), whole(case)
    assert equal(once(before) if saved == "gathered" else before, after)
    kinds = {name.removeprefix("optimizer.state.").partition(".")[0] for name in after if name.startswith("optimizer")}
    main = {kind for kind in kinds if "param" in kind}
    assert kinds - main == {"exp_avg", "exp_avg_sq"} and len(main) == ("bfloat16" in saved)
    assert all(tensor.dtype is torch.float32 for name, tensor in before.items() if name.startswith("optimizer"))
    weights = {tensor.dtype for name, tensor in before.items() if not name.startswith("optimizer")}
    assert (torch.bfloat16 in weights) == ("bfloat16" in saved)


def once(tensors):
    """The tensors without main parameters, which must be a second copy of the weights."""
    front = "optimizer.state.param."
    main = {name.removeprefix(front): tensor for name, tensor in tensors.items() if name.startswith(front)}
    assert len(main) > 20 and equal(main, {name: tensors[name] for name in main})
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(front)}


def chunks(folder):
    """{(tensor of the optimizer, offset): (its file, size of the box)} of a checkpoint."""
    metadata = dcp.FileSystemReader(folder / f"step-{STEP:06d}").read_metadata()
    return {
        (index.fqn, index.offset): (place.relative_path, chunk.sizes)
        for index, place in metadata.storage_data.items()
        if index.fqn.startswith("optimizer") and not index.fqn.startswith("optimizer.state.param.")
        for chunk in metadata.state_dict_metadata[index.fqn].chunks
        if chunk.offsets == index.offset
    }


def test_each_rank_writes_its_slice_which_together_are_what_megatron_gathers(seen, whole):
    """Megatron's own gathering over the data-parallel group is the reference, and how older checkpoints were made: with
    the weights once more, as main parameters."""
    assert equal(once(whole("gathered")), whole("DP3 from two"))
    sliced, gathered = (chunks(seen.written(name)) for name in ("DP3 from two", "gathered"))
    wrote = Counter({f"__{rank}_0.distcp": 0 for rank in range(3)})
    for file, size in sliced.values():
        wrote[file] += math.prod(size)
    assert min(wrote.values()) > 0.9 * max(wrote.values())
    assert gathered.keys() < sliced.keys()  # the witness: tensors are cut where Megatron does not cut them


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 14 / 12), ("float32", 12 / 12)])
def test_a_rank_copies_little_more_than_its_own_state_as_planned(seen, checkpoint, dtype, expected):
    """The ranks share float32 weights and two moments, 12 bytes of a parameter, and its bfloat16 weight, 2 bytes."""
    facts = read_model(checkpoint)
    train = TrainConfig(dtype=dtype, microbatch_tokens=64, optimizer=OptimizerConfig(lr=1e-3))
    buffers = chunk_buffers(facts, make_layout(ONE, facts, 3), range(facts.layers))
    for copied, own in seen(f"copied to write {dtype}"):
        assert copied / own == pytest.approx(expected, abs=0.13)
        assert copied == pytest.approx(checkpoint_copy_bytes(buffers, train, 3), rel=0.02)


def test_a_wrong_checkpoint_is_refused_by_all_ranks_alike(seen):
    told = [rank["told"] for rank in seen("refusals")]
    assert told[0] == told[1] and told[0].keys() == {"model", *DAMAGES}
    told, folder = told[0], checkpoints.name_of(STEP)
    for name in FILES:
        assert "is damaged" in told[f"flipped {name}"] and f"{folder}/{name})" in told[f"flipped {name}"]
    for name in ("truncated", "longer", "of rank 0"):
        assert "is damaged" in told[name] and f"{name}/{folder}/__1_0.distcp" in told[name]
    assert "No such file" in told["gone"] and f"gone/{folder}/__1_0.distcp" in told["gone"]
    for name in ("state gone", "other count", "unsealed"):
        assert "state.json is missing or damaged" in told[name] and f"{name}/{folder})" in told[name]
    assert f"foreign/{folder}): got run.safetensors" in told["foreign"] and "Remove the other files" in told["foreign"]
    assert f"renamed/{checkpoints.name_of(STEP + 1)}): got step {STEP}" in told["renamed"]
    assert f"forged/{folder}/.metadata): got posix.mkdir" in told["forged"] and "is not read" in told["forged"]
    assert not any(rank["canary"] for rank in seen("refusals"))
    assert "belongs to another model" in told["model"] and f"two/{folder}" in told["model"]


@pytest.mark.parametrize("case", ["pieces", "pieces elsewhere"])
def test_a_resume_reads_and_checks_every_byte_and_weights_alone_no_moments(seen, case):
    """A piece that several ranks need is read by each of them."""
    ranks, folder = seen(case), seen.written("EP2 from two") / checkpoints.name_of(STEP)
    sizes = {}
    for name, pieces in json.loads((folder / "state.json").read_text())["pieces"].items():
        spans = [tuple(map(int, piece.split("-"))) for piece in pieces]
        assert [begin for begin, _ in spans] + [(folder / name).stat().st_size] == [0] + [end for _, end in spans]
        sizes |= {(name, piece): end - begin for piece, (begin, end) in zip(pieces, spans, strict=True)}
    resumed, weights = ({piece for rank in ranks for piece in rank[load]} for load in (0, 1))
    assert resumed == sizes.keys() and sum(sizes[piece] for piece in weights) < 0.4 * sum(sizes.values())
    for read, _ in ranks:
        assert len(set(read)) == len(read)
    if case == "pieces":  # the experts and the moments are read by one rank only
        once = Counter(piece for read, _ in ranks for piece in read)
        assert sum(sizes[piece] * number for piece, number in once.items()) < 1.2 * sum(sizes.values())


@pytest.mark.long
def test_a_checkpoint_names_nothing_but_its_metadata(seen):
    """By Python's own account, over every load of this module; the ranks tell each other what they want by pickle."""
    dtypes = {("torch", "float32"), ("torch", "bfloat16")}
    told = {("megatron.core.dist_checkpointing.mapping", name) for name in ("ShardedTensor", "ShardedObject")}
    seen(SAVER), seen("bfloat16 begins"), seen("EP2 copied")
    assert seen.unpickled == unpickling.ALLOWED | told | dtypes


def test_every_file_of_a_checkpoint_is_among_those_that_were_damaged(seen):
    names = {path.name for path in (seen.written("two") / checkpoints.name_of(STEP)).iterdir()}
    assert names == {*FILES, "state.json"}


def test_what_one_rank_finds_not_finite_changes_nothing_on_any(seen):
    """Parameters, main weights, moments, learning rate, counts and random generators, bit for bit; and the next update
    is the one that would have come."""
    for rank in seen("skips"):
        spoiled_loss, spoiled_gradient = rank["results"]
        assert spoiled_loss["nonfinite"] == "loss on rank 1" and 0 < spoiled_loss["grad_norm"] < 1e3  # only the value
        assert spoiled_gradient["nonfinite"].startswith("gradient on rank") and "1" in spoiled_gradient["nonfinite"]
        assert "loss" not in spoiled_gradient["nonfinite"] and not math.isfinite(spoiled_gradient["grad_norm"])
        before, *after = rank["held"]
        kinds = ("random.", "updates", "adam0.0.0.main", "adam0.0.0.exp_avg", "adam0.0.lr", "0.decoder")
        assert all(any(name.startswith(kind) for name in before) for kind in kinds)
        assert all(same(before, later) for later in after)
        assert rank["norms"] == rank["straight norms"] and same(rank["after"], rank["straight after"])
        # the witness: an update that is applied does change it
        for name in ("adam0.0.0.main", "adam0.0.0.exp_avg"):
            assert not torch.equal(before[name], rank["after"][name])
        assert rank["after"]["updates"] == before["updates"] + 1


def test_so_many_skipped_updates_in_a_row_end_the_run_on_all_ranks(seen):
    told = [rank["told"] for rank in seen("skips")]
    assert told[0] == told[1] and len(told[0]) == 1
    assert "(step 7, update 1)" in told[0][0]
    assert f"not finite: {seen('skips')[0]['results'][1]['nonfinite']}" in told[0][0]


@pytest.mark.long
def test_state_says_who_wrote_it(seen):
    for name in LAYOUTS:
        assert seen(name)[0]["state"]["layout"] == {"ranks": 2, **LAYOUTS[SAVER].model_dump(mode="json")}
        assert "files" not in seen(name)[0]["state"]
    assert seen("EP2 from one")[0]["state"]["layout"]["ranks"] == 1
