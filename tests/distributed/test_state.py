"""What outlives a step, when ranks share tensors: the weights that the sampler gets, the reference, a checkpoint.

Checkpoints of one layout are loaded by others. What makes a checkpoint is compared whole: a layout that loads one and
saves it again must write the same names and bits, main weights and Adam's moments included.
"""

import functools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.megatron import unpickling
from moe_rl.proof.matrix import largest, merged
from tests.distributed.conftest import torchrun
from tests.distributed.state_worker import AGAIN, BUCKET, DAMAGES, FILES, LAYOUTS, SAVER, STEP, UPDATES

# The first test waits for all layouts, which on a busy machine takes long.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("state_worker.py")
OTHERS = [name for name in LAYOUTS if name != SAVER]


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("state")
    process = torchrun(2, SCRIPT, checkpoint, out)
    assert process.returncode == 0, process.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def seen(folder):
    return [torch.load(folder / f"rank{r}.pt") for r in range(2)]


@pytest.fixture(scope="module")
def whole(folder):
    """whole(name) -> every tensor of a checkpoint, put together from all ranks' files."""

    @functools.cache
    def read(name):
        reader = dcp.FileSystemReader(folder / name / f"step-{STEP:06d}")
        entries = reader.read_metadata().state_dict_metadata.items()
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return read


def of(seen, key):
    return [rank[key] for rank in seen if key in rank]


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
def test_the_sampler_and_the_reference_get_the_weights(checkpoint, folder, seen, reference, layout, writers):
    """The checkpoint that the ranks cut up, whole and bit for bit."""
    sent, wrote = seen[0][layout, "sent"]
    assert equal(sent, load_file(checkpoint / "model.safetensors"))
    assert wrote == [writers] and not list((folder / "parts").iterdir())
    logprobs = reference(forced=False).logprobs
    assert largest(merged(of(seen, (layout, "reference")), "logprobs"), logprobs) < 2e-5


@pytest.mark.parametrize("way", ["disk", "shared_memory", "broadcast"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_leave_in_buckets_and_a_rank_holds_no_more_than_these(checkpoint, seen, layout, way):
    """Also a rank of many: EP2 and PP2 ranks have half the model to send, of TP2 ETP2 one has all of it."""
    whole = load_file(checkpoint / "model.safetensors")
    (sent, places), _ = seen[0][layout, "streamed"][way]
    assert equal(sent, whole)
    total, largest_tensor = (f(t.nbytes for t in whole.values()) for f in (sum, max))
    # files, rounds with a segment of each rank, or vLLM's buckets, which the tensor that is too much closes
    pieces = sum(places) if way == "disk" else len(places)
    senders = 2 if way == "shared_memory" and layout != "TP2-ETP2" else 1
    assert pieces * senders >= total // (BUCKET + largest_tensor) >= 13
    for rank in seen:
        tensors, memory = rank[layout, "streamed"][way][1]
        if way != "shared_memory":
            assert BUCKET // 2 < tensors <= BUCKET + 2 * largest_tensor or (tensors == 0 and layout == "TP2-ETP2")
        else:  # a tensor at a time, into one segment
            assert tensors <= 2 * largest_tensor
            assert BUCKET // 2 < memory <= BUCKET + 64 * len(whole) or (memory == 0 and layout == "TP2-ETP2")


def test_weights_of_before_the_update_are_refused_as_stale(seen):
    stale = seen[0]["stale"]
    (told,) = stale["told"]
    assert f"version 3, {stale['moved']} of " in told and ": stale, what it was in version 2; " in told
    assert stale["held"] == [2, 3] and stale["moved"] > 200
    # woken for the weights first, for the KV cache when they are there
    assert [part for part, _ in stale["woken"]] == ["weights", "kv_cache"] * 2 + ["weights"] + ["weights", "kv_cache"]
    assert [parts for _, parts in stale["woken"][:4]] == [0, 1, 1, 2]


def test_the_same_layout_goes_on_bit_for_bit(seen):
    """Updates, weights, and what every random stream gives."""
    pairs = [("begins", SAVER)] + [(name, (name, "again")) for name in AGAIN]
    for straight, resumed in ((of(seen, a), of(seen, b)) for a, b in pairs):
        for before, after in zip(straight, resumed, strict=True):
            assert before["norms"] == after["norms"] and before["norms"][0] != before["norms"][1]
            assert equal(before["final"], after["final"])
    for before, after in zip(of(seen, "begins"), of(seen, SAVER), strict=True):
        assert torch.equal(before["drawn"], after["drawn"])
        # not what another layout begins with
        assert not any(torch.equal(before["drawn"], rank[name, "seeded"]) for rank in seen for name in LAYOUTS)


def test_it_is_written_behind_the_run(seen):
    """Held back until two updates had changed everything: what it holds is proven by those that go on from it."""
    for rank in of(seen, "begins"):
        assert (rank["published early"], rank["pending"]) == (False, (STEP, []))


def test_it_is_published_by_itself_when_all_its_files_are_whole(seen):
    """The run may hang in its next sampling: nobody asks. What the ranks agree on afterwards is the same for all."""
    for rank in of(seen, "begins"):
        assert rank["published by itself"] and rank["published"] == (True, STEP)


def test_a_writer_that_fails_or_dies_is_named_on_all_ranks(seen):
    told = [rank["broken"]["told"] for rank in seen]
    assert told[0] == told[1] and len(told[0]) == 3 and all(rank["broken"]["witness"] for rank in seen)
    full = "the disk is full (OSError: [Errno 28] No space left on device, "
    reasons = (f"rank 1: {full}", "rank 1: SystemExit: killed", f"rank 0: {full}")
    for message, reason in zip(told[0], reasons, strict=True):
        assert f"broken/step-{STEP + 1:06d}): got {reason}" in message and ("bytes free" in message) == (full in reason)
        assert f". Fix the cause, then go on after step {STEP} with --resume " in message
    assert seen[0]["broken"]["left"] == [STEP]


def test_metadata_that_cannot_be_written_is_told_and_the_folder_gets_no_name(seen):
    broken = seen[0]["broken metadata"]
    assert broken["witness"] and broken["left"] == [f".step-{STEP:06d}.tmp"]
    (told,) = broken["told"]
    assert "rank 0: the disk is full (OSError: [Errno 28] No space left on device, " in told
    assert "begin the run again in its folder with --resume" in told and "--step 0" in told


CROSSINGS = [("begins", name) for name in OTHERS] + [("begins", "one"), ("one begins", ("EP2", "from one"))]


@pytest.mark.parametrize("saved, loaded", CROSSINGS, ids=str)
def test_another_layout_goes_on(seen, saved, loaded):
    writers, readers = of(seen, saved), of(seen, loaded)
    assert equal(merged(writers, "weights"), merged(readers, "weights"))
    for reader in readers:
        assert reader["updates"] == UPDATES and reader["state"]["cursor"] == 5
        assert reader["norms"] == pytest.approx(writers[0]["norms"], rel=1e-5)
    # the streams of these ranks were never saved: they are those of the seed and the step
    begun = of(seen, ("one", "seeded") if loaded == "one" else (loaded if isinstance(loaded, str) else "EP2", "seeded"))
    assert all(torch.equal(reader["drawn"], drawn) for reader, drawn in zip(readers, begun, strict=True))


@pytest.mark.parametrize("saved, loaded", [("begins", "scored"), ("bfloat16 begins", "scored bfloat16")])
def test_weights_alone_load_in_another_layout_and_precision(seen, saved, loaded):
    """A float32 policy gets the weights that a bfloat16 one computed with. Their digest knows no layout."""
    digests = set()
    for name in AGAIN:
        readers = of(seen, (name, loaded))
        assert equal(merged(of(seen, saved), "weights"), merged(readers, "weights"))
        assert all(reader["updates"] == UPDATES for reader in readers)
        digests |= {reader["digest"] for reader in readers}
    assert len(digests) == 1
    assert seen[0][AGAIN[0], "scored"]["digest"] != seen[0][AGAIN[0], "scored bfloat16"]["digest"]


def test_lost_moments_would_be_noticed(seen):
    straight, without = seen[0]["begins"]["norms"], seen[0]["EP2", "without moments"]
    assert without[0] == pytest.approx(straight[0], rel=1e-5)
    assert without[1] != pytest.approx(straight[1], rel=1e-2)


@pytest.mark.parametrize(
    "saved, again",
    [("two", f"{name} from two") for name in OTHERS]
    + [("two-bfloat16", f"{name} from two-bfloat16") for name in OTHERS]
    + [("one", "EP2 from one")],
)
def test_a_layout_writes_the_checkpoint_it_read(whole, saved, again):
    before, after = whole(saved), whole(again)
    assert equal(before, after)
    kinds = {name.removeprefix("optimizer.state.").partition(".")[0] for name in before if name.startswith("optimizer")}
    assert {"exp_avg", "exp_avg_sq"} < kinds and len(kinds) == 3
    assert all(tensor.dtype is torch.float32 for name, tensor in before.items() if name.startswith("optimizer"))
    weights = {tensor.dtype for name, tensor in before.items() if not name.startswith("optimizer")}
    assert (torch.bfloat16 in weights) == ("bfloat16" in saved)


def test_a_wrong_checkpoint_is_refused_by_all_ranks_alike(seen):
    told = [rank["refusals"]["told"] for rank in seen]
    assert told[0] == told[1] and told[0].keys() == {"model", *DAMAGES}
    told, folder = told[0], checkpoints.name_of(STEP)
    for name in FILES:
        assert "is damaged" in told[f"flipped {name}"] and f"{folder}/{name})" in told[f"flipped {name}"]
    for name in ("truncated", "of rank 0"):
        assert "is damaged" in told[name] and f"{name}/{folder}/__1_0.distcp" in told[name]
    assert "No such file" in told["gone"] and f"gone/{folder}/__1_0.distcp" in told["gone"]
    for name in ("state gone", "other count", "unsealed"):
        assert "state.json is missing or damaged" in told[name] and f"{name}/{folder})" in told[name]
    assert f"foreign/{folder}): got run.safetensors" in told["foreign"] and "Remove the other files" in told["foreign"]
    assert f"renamed/{checkpoints.name_of(STEP + 1)}): got step {STEP}" in told["renamed"]
    assert f"forged/{folder}/.metadata): got posix.mkdir" in told["forged"] and "is not read" in told["forged"]
    assert not any(rank["refusals"]["canary"] for rank in seen)
    assert "is not of this model" in told["model"] and f"two/{folder}" in told["model"]
    assert all(equal(*rank["refusals"]["weights"]) for rank in seen)


def test_a_checkpoint_names_nothing_but_its_metadata(seen):
    """By Python's own account, over every load in every layout; the ranks tell each other what they want by pickle."""
    dtypes = {("torch", "float32"), ("torch", "bfloat16")}
    told = {("megatron.core.dist_checkpointing.mapping", name) for name in ("ShardedTensor", "ShardedObject")}
    found = set().union(*(rank["unpickled"] for rank in seen))
    assert found == unpickling.ALLOWED | told | dtypes


def test_every_file_of_a_checkpoint_is_among_those_that_were_damaged(folder):
    names = {path.name for path in (folder / "two" / checkpoints.name_of(STEP)).iterdir()}
    assert names == {*FILES, "state.json"}


def test_what_one_rank_finds_not_finite_changes_nothing_on_any(seen):
    """Parameters, main weights, moments, learning rate, counts and random generators, bit for bit; and the next update
    is the one that would have come."""
    for rank in (r["skips"] for r in seen):
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
    told = [rank["skips"]["told"] for rank in seen]
    assert told[0] == told[1] and len(told[0]) == 1
    assert "(step 7, update 1)" in told[0][0]
    assert f"what is not finite: {seen[0]['skips']['results'][1]['nonfinite']}" in told[0][0]


def test_state_says_who_wrote_it(seen):
    for name in LAYOUTS:
        assert seen[0][name]["state"]["layout"] == {"ranks": 2, **LAYOUTS[SAVER].model_dump(mode="json")}
        assert "files" not in seen[0][name]["state"]
    assert seen[0]["EP2", "from one"]["state"]["layout"]["ranks"] == 1
