"""Puts new weights into a sampler while it samples, and compares every row and log-probability with `transformers`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from moe_rl.errors import RouteValidationError
from moe_rl.replay.routes import RowPolicy, read_routes
from moe_rl.trace import ShardWriter, TraceStore
from moe_rl.types import Completion, Sequence, VersionSpan
from moe_rl.weights.broadcast import Sender
from tests.rollout.conftest import make_requests
from tests.support.independent import Independent
from tests.support.refusals import refused
from tests.weights.sending import broadcast

# What sees an update is sampled until the test leaves it, as nobody knows how far it comes meanwhile.
PROMPT, ENDLESS, FEW = 40, 3000, 60


class Change:
    """Compares with the two models of an update: the first computes the first rows, the other goes on with the first's
    keys and values. atol: of log-probabilities, see `serving.agree`."""

    def __init__(self, before: Independent, after: Independent, *, atol: float = 2e-5):
        self.before, self.after, self.atol = before, after, atol

    def check(self, completion: Completion, record, rows: int, *, first: int = 0) -> None:
        """Compare a record's rows from `first`, and the log-probabilities, with a pass whose first `rows` rows are of
        the first model."""
        computed = self.after.continued(self.before, rows, completion.prompt_token_ids + completion.token_ids)
        computed.check(completion.key, record.routes[first:], completion.logprobs, first=first, atol=self.atol)


def versions_of(record) -> list[int]:
    """Return the weight version of each row."""
    return [span.weight_version for span in record.spans for _ in range(span.rows)]


def check_kept(completion: Completion, store: TraceStore, change: Change, old: int, new: int) -> bool:
    """Check a completion whose KV cache was kept over the change of version `old` to `new`, or that saw one version.

    Returns whether it saw both.
    """
    record = store.read(completion.routes)
    versions = versions_of(record)
    assert versions == sorted(versions) and set(versions) <= {old, new}
    sampled = [span.weight_version for span in completion.versions for _ in range(span.tokens)]
    assert sampled == versions[len(completion.prompt_token_ids) - 1 :], "row P-1+j made token j"
    change.check(completion, record, versions.count(old))
    return len(set(versions)) == 2


async def forwarded(groups, more: int) -> None:
    """Wait until so many more tokens were forwarded."""
    start = (await groups.counts()).get("forwarded", 0)
    while (await groups.counts()).get("forwarded", 0) < start + more:
        await asyncio.sleep(0.01)


def trainer_reads(store: TraceStore, key, prompt, sampled, versions, ref, *, version: int) -> None:
    """Read the routes of a completion as a trainer does that has the weights `version`. versions: of its tokens."""
    tokens = (*prompt, *sampled)
    one = Sequence(key, tuple(prompt), tuple(sampled), np.zeros(len(sampled), np.float32), 0.0, tuple(versions), ref)
    record = store.read(ref)
    here = np.ones(len(tokens) - 1, bool)
    read_routes(store, [one], record.spec, layers=record.layers, fed=[tokens[:-1]], here=[here],
                weight_version=version, policy=RowPolicy(max_staleness=1))  # fmt: skip


def refuses_exchanged_versions(completions: list[Completion], store: TraceStore, folder, old: int, new: int) -> None:
    """Assert that the trainer reads the routes of a completion that saw an update. It refuses them with the version of
    the update alone, and with the two parts of its versions exchanged, in the completion or in the record."""
    first = completions[0]
    assert len(first.versions) == 2

    def read(versions, ref=first.routes, at=store):
        trainer_reads(at, first.key, first.prompt_token_ids, first.token_ids, versions, ref, version=new)

    read(first.versions)
    for versions in ((VersionSpan(len(first.token_ids), new),), first.versions[::-1]):
        with refused(RouteValidationError, request=first.key, fault="versions of rows"):
            read(versions)
    record, exchanged = store.read(first.routes), {old: new, new: old}
    with ShardWriter(folder, "exchanged", record.spec) as writer:
        spans = [replace(span, weight_version=exchanged[span.weight_version]) for span in record.spans]
        ref = writer.add(first.key, record.routes, record.token_ids, spans)
    with refused(RouteValidationError, request=first.key, fault="versions of rows"):
        read(first.versions, replace(ref, source_sum=first.routes.source_sum), TraceStore(folder))


async def by_broadcast(groups, workers: int, tensors, **about) -> None:
    """Broadcast an update to a Sampler that pauses and has so many workers."""
    loop = asyncio.get_running_loop()

    def take(part):
        asyncio.run_coroutine_threadsafe(groups.take_weights(part), loop).result()

    def send():
        senders = [Sender(rank, "127.0.0.1", workers, torch.device("cpu")) for rank in (0, 1)]
        assert broadcast(SimpleNamespace(update_weights=take), senders, tensors, bucket=100_000, **about)

    await asyncio.to_thread(send)


async def keep(groups, send, store, change, *, old, new, name) -> list[Completion]:
    """Send an update while three groups are under way; a fourth one comes during the pause, a fifth after it.

    The first three are left when the others have ended.
    """
    leave = asyncio.Event()

    def sample(number, tokens):
        asked = make_requests(1, 3, prompt=PROMPT, max_tokens=tokens)
        asked = [replace(r, key=f"{number}/{r.key}", seed=r.seed + 50 * number) for r in asked]
        sampling = groups.sample(groups.places[0], asked, shard=f"{name}-{number}", leave=leave)
        return asyncio.ensure_future(sampling)

    tasks = [sample(number, ENDLESS) for number in range(3)]
    await forwarded(groups, 150)
    await groups.pause()
    tasks.append(sample(3, FEW))
    still = (await groups.counts()).get("forwarded", 0)
    await send(groups)
    assert (await groups.counts()).get("forwarded", 0) == still, "nothing is forwarded in a pause"
    assert not any(task.done() for task in tasks)
    await groups.resume()
    tasks.append(sample(4, FEW))
    await asyncio.gather(*tasks[3:])
    leave.set()
    sampled = await asyncio.gather(*tasks)
    for number, group in enumerate(sampled):
        assert [one.finish_reason for one in group] == ["abort" if number < 3 else "length"] * 3
        both = [check_kept(one, store, change, old, new) for one in group]
        assert both == [number < 3] * 3, "the update came while these were sampled"
        if number >= 3:
            # The same prompt was cached under the old weights. Its group shares a prefix of its own version.
            assert all(one.oldest_version == new for one in group)
    return [one for group in sampled for one in group]


async def begin_late(groups, send, store, change, *, old, new, name, at_once: int) -> None:
    """Send an update while two requests of a group wait, as the sampler runs only so many at once. They begin under the
    new weights, although the prompt of their group is cached under the old ones."""
    requests = make_requests(1, at_once + 2, prompt=PROMPT, max_tokens=600)
    task = groups.sample(groups.places[0], requests, shard=f"{name}-late", leave=asyncio.Event())
    task = asyncio.ensure_future(task)
    await forwarded(groups, PROMPT + 20 * at_once)
    await groups.pause()
    await send(groups)
    await groups.resume()
    sampled = await task
    both = [check_kept(one, store, change, old, new) for one in sampled]
    assert sum(both) == at_once and [one.oldest_version for one in sampled].count(new) == 2


async def recompute(groups, send, store, change, *, old, new, name) -> None:
    """Leave a group before an update, and continue its completions under the new weights: with the earlier record as
    parent, whose rows stay as they were, and without, where all rows are of the new weights."""
    place, leave = groups.places[0], asyncio.Event()
    requests = make_requests(1, 2, prompt=PROMPT, max_tokens=ENDLESS)
    task = asyncio.ensure_future(groups.sample(place, requests, shard=f"{name}-before", leave=leave))
    await forwarded(groups, 120)
    leave.set()
    parts = await task
    assert [part.finish_reason for part in parts] == ["abort"] * 2 and all(p.token_ids for p in parts)
    for part in parts:
        assert part.newest_version == old and not check_kept(part, store, change, old, old)
    await groups.pause()
    await send(groups)
    await groups.resume()
    continued = []
    for request, part in zip(requests, parts, strict=True):
        fed = part.prompt_token_ids + part.token_ids
        for key, parent in (("first", part.routes), ("exact", None)):
            continued.append(replace(request, key=f"{key}/{request.key}", prompt_token_ids=fed, max_tokens=FEW,
                                     parent=parent))  # fmt: skip
    rest = await groups.sample(place, continued, shard=f"{name}-after", leave=asyncio.Event())
    for at, one in enumerate(rest):
        part, fed = parts[at // 2], one.prompt_token_ids + one.token_ids
        record = store.read(one.routes)
        assert {span.weight_version for span in one.versions} == {new} and len(record.routes) == len(fed) - 1
        first = part.routes.rows if at % 2 == 0 else 0
        assert versions_of(record) == [old] * first + [new] * (len(fed) - 1 - first)
        change.check(one, record, 0, first=first)
        np.testing.assert_array_equal(record.routes[:first], store.read(part.routes).routes[:first])
