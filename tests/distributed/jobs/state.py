"""Jobs for ranks: what outlives a step, which is weights to the sampler, the reference, a checkpoint."""

import json
import os
import pickle
import shutil
import sys
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.comparison.sources import weights_digest
from moe_rl.config.schema import GuardsConfig
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import CheckpointError, NonFiniteError, ReplayError, WeightSyncError
from moe_rl.megatron import checkpoint, hf_map, rng, saving, world
from moe_rl.megatron import model as built
from moe_rl.megatron.behind import Writer
from moe_rl.megatron.frozen_policy import ReferencePolicy
from moe_rl.megatron.hf_files import CheckpointReader, write_checkpoint
from moe_rl.megatron.model import DTYPES, unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Exports
from moe_rl.models.hf import read_model
from moe_rl.proof import cases
from moe_rl.proof.trial import Trial
from moe_rl.train.guards import Guards
from moe_rl.weights import broadcast
from moe_rl.weights.handles import HandleWay
from moe_rl.weights.shared_memory import SegmentWriter
from moe_rl.weights.stream import Round
from moe_rl.weights.update import CudaBuffer
from tests.weights.taking import Taker, sender_of, taken

ONE = ParallelConfig()
SAVER = "TP2-EP2"
LAYOUTS = {
    SAVER: ParallelConfig(tensor=2, expert=2),
    "EP2": ParallelConfig(expert=2),
    "TP2-ETP2": ParallelConfig(tensor=2, expert_tensor=2),
    "PP2-VPP2": ParallelConfig(pipeline=2, virtual_pipeline=2),
}
# Resumed once more, from a checkpoint of their own.
AGAIN = ("TP2-ETP2", "PP2-VPP2")
SEED, STEP, UPDATES = 1, 1, 2
# The files of a checkpoint that two ranks wrote.
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json", "rng-rank0.safetensors", "rng-rank1.safetensors")
BUCKET = 150_000  # bytes


class Case:
    """A policy in one layout, new from the model's folder, and the same data as in every other layout."""

    def __init__(self, source, out, parallel, dtype="float32"):
        dtype, *sums = dtype.split()  # "bfloat16 sums": gradients are summed over the ranks in bfloat16 too
        self.out, self.parallel, self.dtype = out, parallel, DTYPES[dtype]
        settings = {"megatron_optimizer": {"grad_reduce_in_fp32": False}} if sums else {}
        case = cases.Case(dist.get_world_size(), parallel.model_dump(), {"dtype": dtype, **settings})
        self.build = (read_model(source), case.train_config, parallel, source)
        self.policy = Policy(*self.build, temperature=1.0)
        self.trial = Trial(self.build[0], case, self.policy)

    def update(self):
        """The gradient norm of one more update."""
        return self.natively(self.trial.loss).grad_norm

    def natively(self, loss):
        result, _ = self.policy.update(self.trial.work(self.trial.tables, None), loss, None, "update")
        return result

    def weights(self):
        exported = dict(self.policy.export(torch.float32, dense=True, experts=True))
        return {name: tensor.clone() for name, tensor in exported.items()}

    def next_two(self):
        """What the random streams give, the norms of two updates and the weights after them."""
        return {"drawn": draw(), "norms": [self.update() for _ in range(2)], "final": self.weights()}

    def save(self, name):
        self.saving(name, asynchronous=False).save(STEP, self.policy, {"cursor": 5})

    def saving(self, name, asynchronous=True):
        return saving.Checkpoints(self.out / name, self.parallel, keep=1, asynchronous=asynchronous)

    def exporting(self, name):
        folder, (facts, *_, model) = self.out / f"{name} export", self.build
        return Exports(folder, facts, model, self.dtype, keep=1, resume_from=self.out / name)

    def load(self, name):
        path = checkpoints.find(self.out / name)
        with named(UNPICKLED):
            return checkpoint.load(path, self.policy, parallel=self.parallel, seed=SEED)

    def send(self):
        """The weights as a sampler gets them by disk, and how many ranks wrote them."""
        taker = taken(self.policy, self.build[-1], self.out / "parts")
        return (taker.weights, taker.places) if taker else ({}, [])

    def streamed(self, way):
        """The same by a way, in buckets; and the most bytes that a rank held of tensors, and of shared memory or packed
        buckets. The way broadcast_by_1 has one sender."""
        way, _, senders = way.partition("_by_")
        settings = {"weight_bucket_mib": BUCKET / 2**20} | ({"weight_senders": int(senders)} if senders else {})
        held, most, sent = [0, 0], [0, 0], [0]

        def note(which, number):
            held[which] += number
            most[which] = max(most[which], held[which])

        def watched(run):
            for name, tensor in run:
                # On a CPU what is exported in the parameters' precision is the parameter itself.
                copy = tensor.clone()
                note(0, copy.nbytes)
                weakref.finalize(copy.untyped_storage(), note, 0, -copy.nbytes)  # views keep it
                yield name, copy
                del copy

        def rounds(*arguments, **more):
            return [replace(run, tensors=watched(run.tensors)) for run in export_rounds(*arguments, **more)]

        def append(writer, tensor):
            write(writer, tensor)
            note(1, sum(os.fstat(int(link)).st_size for link in segments()) - held[1])

        def packing(*arguments, **more):
            octets = packed(*arguments, **more)
            # A thread of gloo may let go of a bucket late. One that somebody else keeps stays, and is counted.
            deadline = time.monotonic() + 5
            while held[1] > sent[-1] and time.monotonic() < deadline:
                time.sleep(0.001)
            sent.append(octets.nbytes)
            note(1, octets.nbytes)
            weakref.finalize(octets.untyped_storage(), note, 1, -octets.nbytes)
            return octets

        export_rounds, write, packed = self.policy.export_rounds, SegmentWriter.append, broadcast.packed
        with (
            patch.object(self.policy, "export_rounds", rounds),
            patch.object(SegmentWriter, "append", append),
            patch("moe_rl.weights.broadcast.packed", packing),
            patch("moe_rl.weights.stream.packed", packing),
        ):
            taker = taken(self.policy, self.build[-1], self.out / "parts", way, **settings)
        return (taker.weights, taker.places) if taker else ({}, []), most

    def reference(self):
        work = self.trial.work(self.trial.tables, None)
        ReferencePolicy(*self.build, temperature=1.0).score(work)
        return {"logprobs": self.trial.by_sequence([one.ref_logprobs for one in work])}


# (module, name) of all that pickles named while checkpoints were loaded; sets that are being filled.
UNPICKLED, FILLED, LISTENING = set(), [], []


def note(event, arguments):
    """For sys.addaudithook."""
    if event == "pickle.find_class":
        for names in FILLED:
            names.add(arguments)


@contextmanager
def named(names):
    """Fill `names` with what pickles name while this lasts."""
    FILLED.append(names)
    yield
    FILLED.remove(names)


def segments():
    """Descriptors of this process's shared memory."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(link).startswith("/memfd:moe_rl-weights"):
                found.append(link.name)
    return found


def draw():
    """Numbers of every random stream of this rank."""
    tracker = rng.tensor_parallel.get_cuda_rng_tracker()
    drawn = [torch.rand(4)]
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            drawn.append(torch.rand(4, device=world.device()).cpu())
    return torch.stack(drawn)


def seeded(_):
    """The same, of streams that were begun anew after the checkpoint's step."""
    rng.seed(SEED, STEP)
    return draw()


def begin(new, name):
    """Train, save as `name`, and go on."""
    case = new()
    for _ in range(UPDATES):
        case.update()
    draw()
    seen, writes, exports = {"weights": case.weights()}, case.saving(name), case.exporting(name)
    with held_writers() as release:
        writes.save(STEP, case.policy, {"cursor": 5})
        exports.save(STEP, case.policy)
        seen |= {"published early": writes.poll(), **case.next_two()}
        seen |= {"pending": (writes.pending, checkpoints.complete(writes.folder))}
        release()
        seen["published by itself"] = appeared(checkpoints.name_of(STEP), writes.folder)
        seen["published"] = (writes.finish(), writes.last)
        seen["exported"] = (exports.finish(), exports.last)
        exports.save(STEP, case.policy)  # of other weights by now, so it must not be written
        seen["again"] = exports.pending
    return seen


def exported(new, saved):
    """The weights of the checkpoint `saved`, written as `moe-rl export` does. Returns the folder."""
    case = new()
    checkpoint.load_weights(checkpoints.find(case.out / saved), case.policy)
    facts, *_, model = case.build
    dense, experts = world.holds_first_replica()
    tensors = hf_map.export(map(unwrap, case.policy.chunks), facts, dense=dense, experts=experts)
    out = case.out / f"{saved} from its checkpoint"
    write_checkpoint(out, tensors, facts, CheckpointReader(model, facts), case.dtype)
    return out


def appeared(name, folder):
    """Whether it did, while the ranks say nothing to each other."""
    limit = time.monotonic() + 60
    while not (there := (folder / name).exists()) and time.monotonic() < limit:
        time.sleep(0.01)
    return there


@contextmanager
def held_writers():
    """The threads that write checkpoints do not begin before the function that this gives is called."""
    go, run = threading.Event(), Writer.run

    def held(writer):
        go.wait()
        run(writer)

    with patch.object(Writer, "run", held):
        yield go.set


def pieces_read(new, saved):
    """[(file, begin-end), ...] of what this rank reads of Megatron's files to resume, and to load only weights."""
    case, seen = new(), []
    path = checkpoints.find(case.out / saved)
    for load in (lambda: case.load(saved), lambda: checkpoint.load_weights(path, case.policy)):
        read, real = [], checkpoint._piece

        def piece(pieces, file, offset, length, read=read, real=real):
            read.append((Path(file.name).name, f"{offset}-{offset + length}"))
            return real(pieces, file, offset, length)

        with patch.object(checkpoint, "_piece", piece):
            load()
        seen.append(read)
    return seen


def broken_writers(new, saved):
    """What this rank is told when the thread of rank 1 fails at a file, when it dies, and when rank 0 cannot make the
    folder; and what is left."""
    case, told, real = new(), [], checkpoint.digest
    folder = case.out / "broken"
    if dist.get_rank() == 0:
        shutil.copytree(case.out / saved, folder)
    dist.barrier()
    for failure in (OSError(28, "No space left on device"), SystemExit("killed")):

        def digest(*where, failure=failure):
            if dist.get_rank() == 1:
                raise failure
            return real(*where)

        writes = case.saving("broken")
        with patch("moe_rl.megatron.saving.checkpoint.digest", digest):
            writes.save(STEP + 1, case.policy, {"cursor": 6})
            writes._pending.writer.written.wait()
        dist.barrier()
        try:
            told.append(f"published: {writes.poll()}")
        except CheckpointError as error:
            told.append(str(error))
    full = OSError(28, "No space left on device")
    with patch("moe_rl.megatron.behind.checkpoints.begin", side_effect=full) as begun:
        try:
            case.saving("broken").save(STEP + 1, case.policy, {"cursor": 6})
        except CheckpointError as error:
            told.append(str(error))
    witness = begun.call_count == (dist.get_rank() == 0)
    exports, exporting = case.exporting("broken"), []
    with patch("moe_rl.megatron.hf_files.save_file", side_effect=full) if dist.get_rank() else nullcontext():
        exports.save(STEP, case.policy)
        try:
            exports.finish()
        except CheckpointError as error:
            exporting.append(str(error))
    return {
        "exporting": exporting,
        "told": told,
        "left": [step for step, _ in checkpoints.complete(folder)],
        "witness": witness,
    }


def broken_metadata(new):
    """What the only rank is told when the disk is full once the tensors are written, and what is there then."""
    case, told = new(), []
    full = OSError(28, "No space left on device")
    with patch.object(saving.FileSystemWriterAsync, "finish", side_effect=full) as finished:
        try:
            case.save("unfinished")
        except CheckpointError as error:
            told.append(str(error))
    left = [path.name for path in (case.out / "unfinished").iterdir()]
    return {"told": told, "left": left, "witness": finished.call_count == 1}


def resume(new, saved, name=""):
    """Load the checkpoint `saved`, save it again if there is a name to save it as, and go on."""
    case = new()
    state = case.load(saved)
    seen = {"state": state, "updates": case.policy.updates, "weights": case.weights()}
    if name:
        case.save(name)
    return {**seen, **case.next_two()}


def gathered(new, saved, name):
    """Load the checkpoint `saved` and save it as `name`, with the optimizer's state as Megatron itself gathers it."""

    def megatrons(optimizer, model, **_):
        state = optimizer.sharded_state_dict(model, metadata=dict(checkpoint.CONTENT))
        return checkpoint.extract_sharded_base({"param_state": state["param_state"]})[0]

    case = new()
    case.load(saved)
    with patch.object(checkpoint, "sharded_slices", megatrons):
        case.save(name)


def copied_to_write(new, saved):
    """The bytes that a rank copies to write a checkpoint, and those of its own optimizer state."""
    case = new()
    case.load(saved)
    writes = case.saving(f"{saved} copied")
    with held_writers() as release:
        writes.save(STEP, case.policy, {"cursor": 5})
        part = writes._pending.writer._write
        copies = [tensor for _, _, (_, tensors) in part.buckets for _, tensor in tensors]
        release()
    writes.finish()
    state = [
        tensor for name, tensor in held(case.policy).items() if name.startswith("adam") and torch.is_tensor(tensor)
    ]
    return sum(copy.untyped_storage().nbytes() for copy in copies), sum(tensor.nbytes for tensor in state)


def scored(new, saved):
    """The weights of `saved` alone, in a policy that will not be trained, and their digest."""
    case = new()
    state = checkpoint.load_weights(checkpoints.find(case.out / saved), case.policy)
    return {
        "weights": case.weights(),
        "updates": state["updates"],
        "digest": weights_digest(case.policy, "float32"),
    }


def started(new, saved, optimizer):
    """A new run that starts from the checkpoint `saved`. What it computes with is what its optimizer has, else this
    ends the worker."""
    case = new()
    checkpoint.load_start(checkpoints.find(case.out / saved), case.policy, optimizer=optimizer)
    case.policy.content(torch.bfloat16, updated=True)
    seen = {"weights": case.weights(), "updates": case.policy.updates, "moves": case.policy.moves}
    seen["norms"] = [case.update() for _ in range(2)]
    return seen | {"lr": case.policy.optimizer.param_groups[0]["lr"]}


def copy(new, saved, name):
    """Load the checkpoint `saved` and save it again as `name`. What is computed with is what the optimizer has, then
    and after one more update; else this ends the worker."""
    case = new()
    case.load(saved)
    case.save(name)
    case.policy.content(torch.bfloat16, updated=True)
    case.update()
    case.policy.content(torch.bfloat16, updated=True)


def without_moments(new, saved):
    """The norms of the next updates when Adam's moments are lost."""
    case = new()
    case.load(saved)
    for optimizer in case.policy.optimizers:
        for moments in optimizer.optimizer.state.values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()
    return [case.update() for _ in range(2)]


def zeroed(new, saved, rank, moment):
    """What this rank is told of the optimizer as it was loaded, and after a moment of Adam was zeroed on one rank."""
    case, told = new(), []
    path, state = checkpoints.find(case.out / saved), case.load(saved)
    for planted in (False, True):
        if planted and dist.get_rank() == rank:
            for optimizer in case.policy.optimizers:
                for moments in optimizer.optimizer.state.values():
                    moments[moment].zero_()
        try:
            checkpoint.check_optimizer(path, case.policy, state["optimizer"])
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
    return told


def router_gradients(new, rank):
    """What this rank is told of updates in which one rank's gradient of the second router is zeroed, before the sum
    over the ranks and behind it, and whether anything had changed; and of the same update without it."""
    case, told = new(), []
    case.update()  # Adam has moments
    router, mine = case.policy._routers()[1].weight, dist.get_rank() == rank
    finalize = built.finalize_model_grads

    def zeroing(chunks, *arguments, **options):
        finalize(chunks, *arguments, **options)
        router.main_grad.zero_()

    for where in ("before", "behind", "nowhere"):
        hook = router.register_hook(lambda gradient: gradient * 0) if mine and where == "before" else None
        planted = patch.object(built, "finalize_model_grads", zeroing) if mine and where == "behind" else nullcontext()
        before = held(case.policy)
        with planted:
            try:
                told.append(str(case.update()))
            except ReplayError as error:
                after = held(case.policy)
                same = all(torch.equal(one, after[name]) for name, one in before.items() if torch.is_tensor(one))
                told.append(f"{error}{'' if same else ' CHANGED'}")
        if hook is not None:
            hook.remove()
    return told


def held(policy):
    """Everything that an update may change, of this rank: {name: tensor or number}."""
    found = {f"random.{name}": state for name, state in rng.state().items()} | {"updates": policy.updates}
    for number, chunk in enumerate(policy.chunks):
        found |= {f"{number}.{name}": t for name, t in unwrap(chunk).state_dict().items() if torch.is_tensor(t)}
    for number, optimizer in enumerate(policy.optimizers):
        for g, group in enumerate(optimizer.optimizer.param_groups):
            found |= {f"adam{number}.{g}.{name}": value for name, value in group.items() if name != "params"}
            for p, parameter in enumerate(group["params"]):
                moments = {"main": parameter, **optimizer.optimizer.state[parameter]}
                found |= {f"adam{number}.{g}.{p}.{name}": value for name, value in moments.items()}
    return {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in found.items()}


def spoiled(case, what):
    """An update in which rank 1 alone has a loss, or a gradient of its logprobs, that is not finite. Numbers of every
    random stream are drawn in it, as dropout would."""

    def loss(number, logprobs):
        draw()
        value = case.trial.loss(number, logprobs)
        if dist.get_rank() == 1 and what == "loss":
            return value + torch.nan  # of which the gradient is finite
        if dist.get_rank() == 1 and logprobs.numel():
            logprobs.register_hook(lambda gradient: gradient * torch.inf)
        return value

    return case.natively(loss)


def stale(new):
    """Updates of the sampler: by weights that did not move, by old ones after they did, and by the new ones."""
    case = new()
    taker, sender = Taker(case.build[-1]), sender_of(case.policy, case.out / "parts", "shared_memory")
    told, copies = [], [(name, tensor.clone()) for name, tensor in case.weights().items()]
    for version in (1, 2):
        sender.send(taker, version)
    case.update()
    before = lambda *_, **__: [Round([], iter(copies))]  # noqa: E731 - an export that the optimizer has not reached
    with patch.object(case.policy, "export_rounds", before):
        try:
            sender.send(taker, 3)
        except WeightSyncError as error:
            told.append(str(error))
    held = taker.intake.holding().version
    sender.send(taker, 3)
    moved = [name for name, tensor in copies if not torch.equal(tensor, taker.weights[name])]
    return {"told": told, "held": [held, taker.intake.holding().version], "moved": len(moved), "woken": taker.woken}


def handed(new):
    """The weights as two engines beside the ranks get them, the parts that each got, and what the second says of a byte
    that changes in the last part of the next update. A GPU's buffer is a file here, which another process can map."""
    case, rank, spoiled = new(), dist.get_rank(), []

    def share(way, buffer):
        file, size = case.out / f"gpu{rank}-{len(buffer)}", len(buffer)
        way._buffer = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
        way._handle = [CudaBuffer(f"GPU-{rank}", size, 0, os.fsencode(file), size, 0, b"", 0, b"", True)]

    def engine(number):
        def read(update, source):
            (buffer,) = (buffer for buffer in source.buffers if buffer.gpu_uuid == f"GPU-{number}")
            octets = torch.from_file(
                os.fsdecode(buffer.storage_handle), shared=True, size=buffer.size, dtype=torch.uint8
            )
            octets[0] ^= number in spoiled and update.final
            return {name: tensor.clone() for name, tensor in broadcast.unpacked(octets, update.tensors)}

        taker = Taker(case.build[-1])
        taker.reader._unpacked = read
        return taker

    def update_weights(update):
        for taker in engines:
            taker.update_weights(update)

    engines = [engine(number) for number in range(2)] if rank == 0 else []
    sampler = SimpleNamespace(wake=lambda part: None, update_weights=update_weights) if engines else None
    settings = {"engines": 2, "prompts_per_step": 2, "weight_bucket_mib": BUCKET / 2**20}
    with patch.object(HandleWay, "_share", share):
        sender = sender_of(case.policy, case.out / "parts", "cuda_ipc", **settings)
        sender.send(sampler, 1)
        seen = [(dict(taker.weights), len(taker.places)) for taker in engines]
        spoiled.append(1)
        case.update()
        told = ""
        try:
            sender.send(sampler, 2)
        except WeightSyncError as error:
            told = str(error)
            for _ in range(2):  # rank 1 waits after the last part, and before the engines wake up
                dist.barrier()
    return seen, told, [taker.intake.holding().whole for taker in engines]


def skips(new):
    """An update, one with a spoiled loss, one with a spoiled gradient, a good one; then the same without these two."""
    case, guards = new(), Guards(GuardsConfig(max_skipped_updates=2))
    seen = {"norms": [case.update()], "held": [held(case.policy)], "results": [], "told": []}
    for update, what in enumerate(("loss", "gradient")):
        result = spoiled(case, what)
        seen["results"].append(asdict(result))
        seen["held"].append(held(case.policy))
        try:
            guards.after_update(result, step=7, update=update)
        except NonFiniteError as error:
            seen["told"].append(str(error))
    seen["norms"].append(case.update())
    seen["after"] = held(case.policy)
    straight = new()
    begun = seen["held"][0].items()
    rng.set_state({name.removeprefix("random."): state for name, state in begun if name.startswith("random.")})
    seen["straight norms"] = [straight.update() for _ in range(2)]
    seen["straight after"] = held(straight.policy)
    return seen


def of_two_layers(model, folder):
    """The model without its last layers, as a checkpoint of its own."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    cut = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or int(name.split(".")[2]) < 2}
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Hostile:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def forge(path):
    """Metadata that makes a folder when it is read, and digests that agree."""
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(path.with_name("canary"))))
    state = json.loads((path / "state.json").read_text())
    state["files"][".metadata"] = checkpoint.digest(path / ".metadata")
    del state["digest"]
    (path / "state.json").write_text(checkpoint.sealed(state))


def replace_text(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


# What happens to a checkpoint's folder. Some give it another name.
DAMAGES = {
    **{f"flipped {name}": (lambda path, name=name: flip(path / name)) for name in FILES},
    "truncated": lambda path: os.truncate(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size - 1),
    "longer": lambda path: os.truncate(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size + 1),
    "gone": lambda path: (path / "__1_0.distcp").unlink(),
    "state gone": lambda path: (path / "state.json").unlink(),
    "other count": lambda path: replace_text(path / "state.json", f'"updates": {UPDATES}', f'"updates": {UPDATES + 1}'),
    "unsealed": lambda path: replace_text(path / "state.json", ' "digest": ', ' "digested": '),
    "foreign": lambda path: shutil.copy(path / "rng-rank0.safetensors", path / "run.safetensors") and None,
    "of rank 0": lambda path: shutil.copy(path / "__0_0.distcp", path / "__1_0.distcp") and None,
    "forged": forge,
    "renamed": lambda path: path.rename(path.with_name(checkpoints.name_of(STEP + 1))),
}


def refusals(new, saved):
    """What this rank is told of checkpoints of another model, and of DAMAGES."""
    case, told = new(), {}
    source = checkpoints.find(case.out / saved)

    def attempt(path, policy):
        try:
            checkpoint.load(path, policy, parallel=case.parallel, seed=SEED)
            return "loaded"
        except CheckpointError as error:
            return str(error)

    _, train, parallel, model = case.build
    smaller = case.out / "smaller"
    if dist.get_rank() == 0:
        of_two_layers(model, smaller)
    dist.barrier()
    told["model"] = attempt(source, Policy(read_model(smaller), train, parallel, smaller, temperature=1.0))
    for name, damage in DAMAGES.items():
        path = case.out / name / source.name
        if dist.get_rank() == 0:
            shutil.copytree(source, path)
            path = damage(path) or path
        path = Path(world.broadcast(str(path), str))
        told[name] = attempt(path, case.policy)
    return {"told": told, "canary": (case.out / "forged/canary").exists()}


def run(action, source, out, parallel, dtype, *arguments):
    """(what this rank saw, what pickles named while checkpoints were loaded here so far).

    action: a method of Case, or a function of this module that takes a function which makes one. The case is new in
    this layout and precision. Checkpoints lie in folders of OUT.
    """
    if not LISTENING:
        sys.addaudithook(note)  # for ever
        LISTENING.append(True)
    world.lay_out(parallel, seed=SEED)

    def new():
        return Case(source, out, parallel, dtype)

    found = getattr(new(), action)(*arguments) if hasattr(Case, action) else globals()[action](new, *arguments)
    return found, sorted(UNPICKLED)
