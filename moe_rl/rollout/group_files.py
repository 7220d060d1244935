"""Keeps the groups that no step has consumed yet, so that a restarted pool continues them. Owns all files of groups:
only it decides which may be deleted.

`groups/000012.group` holds the completions of the prompt with cursor 12, and their verdicts if they are judged. Their
routes are in the group's own trace shards, `group000012-0` and so on, one for each call that sampled part of it.
Sessions of episodes are named like the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moe_rl.errors import DataError, MoeRLError
from moe_rl.rollout import sealed
from moe_rl.rollout.groups import Group, State, all_pieces, unfinished
from moe_rl.rollout.kept import KeptRollouts, group_shard_name, shard_group, shards_of
from moe_rl.rollout.trajectories import Trajectory
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource
from moe_rl.types import Completion, Prompt, Verdict

_HEAD, _WHAT = "moe_rl group 1", "the completions of a group"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a file holds of a `Group`. prompt: its id."""

    cursor: int
    prompt: str
    oldest: int
    version: int
    pieces: list[list[Completion]]
    verdicts: list[Verdict]
    trajectories: list[Trajectory] = field(default_factory=list)


class GroupFiles:
    """Manages the group files in `folder`, and decides how long the files of a group stay. They have three users:

        the feed    from `begin` or `load` on, until `counted`: also a dropped group is measured by the next step
        a call      that samples the group: it writes records that continue earlier ones, also after a drop
        a step      that trained on the group, as long as its rollouts are kept

    Args:
        kept: the rollouts of steps. The trace shards and sessions of groups are next to theirs.
        ledger: records which groups the steps of an earlier process trained on.
    """

    def __init__(self, folder: Path, kept: KeptRollouts, ledger: PromptLedger):
        self.folder, self._kept, self._ledger = folder, kept, ledger
        self._used: dict[int, int] = {}  # the largest number in the name of a group's shard, by cursor
        self._begun: set[int] = set()  # groups that no step has counted
        self._running: set[int] = set()  # groups that a call is sampling
        self._consumed: dict[int, list[int]] = {}  # the groups of each step that is kept
        for name in kept.store.shards():
            if (group := shard_group(name)) is not None:
                cursor, number = group
                self._used[cursor] = max(number, self._used.get(cursor, -1))

    def shard(self, cursor: int) -> str:
        """Return the name of a new shard for a group."""
        self._used[cursor] = self._used.get(cursor, -1) + 1
        return group_shard_name(cursor, self._used[cursor])

    def begin(self, cursor: int) -> None:
        """Keep the files of a group from now on."""
        self._begun.add(cursor)

    @contextmanager
    def running(self, cursor: int) -> Iterator[None]:
        """Keep the files of a group while this context is open, whatever becomes of the group."""
        self._running.add(cursor)
        try:
            yield
        finally:
            self._running.discard(cursor)

    def counted(self, step: int, consumed: list[int], dropped: Iterable[int]) -> None:
        """Note that a step's batch of consumed groups is on disk, and that its dropped groups are measured."""
        self._consumed[step] = consumed
        for cursor in (*consumed, *dropped):
            self.remove(cursor)

    def unneeded(self, steps: set[int]) -> Callable[[], None]:
        """Find the rollouts of all other steps, and the shards and sessions of groups without a user. Returns what
        deletes them, see KeptRollouts.unneeded."""
        for step in steps - self._consumed.keys():
            if (line := self._ledger.find(step - 1)) is not None:
                self._consumed[step] = line.consumed()
        self._consumed = {step: cursors for step, cursors in self._consumed.items() if step in steps}
        return self._kept.unneeded(steps, self._begun.union(self._running, *self._consumed.values()))

    def save(self, group: Group, prompt: Prompt) -> None:
        """Write a group. The file appears complete or not at all. `load` deletes it if a power cut damaged it."""
        sampled = group.pieces, group.verdicts, group.trajectories
        kept = _Kept(group.cursor, prompt.id, group.oldest, group.version, *sampled)
        sealed.save(self._path(group.cursor), _HEAD, kept, _WHAT, synced=False)

    def load(self, source: PromptSource, unusable: list[str], fits: Callable[[Group], bool]) -> Iterator[Group]:
        """Read all groups, in the order of their cursors. A group that cannot be used is deleted.

        Args:
            source: the prompts.
            unusable: gets a message for each group that cannot be used.
            fits: whether the microbatches hold what must be in one of them.
        """
        for path in self.folder.glob("*.tmp"):
            path.unlink()
        for path in sorted(self.folder.glob("*.group"), key=lambda file: (len(file.name), file.name)):
            try:
                group = self._load(path, source)
                if not fits(group):
                    raise DataError(
                        "the completions of a group do not fit into a microbatch",
                        where={"file": path, "group": group.cursor},
                        got="a smaller train.microbatch_tokens than when they were sampled",
                    )
            except MoeRLError as error:
                unusable.append(str(error))
                path.unlink()
                continue
            self.begin(group.cursor)
            yield group

    def remove(self, cursor: int) -> None:
        """End a group of the feed: delete its file, if there is one. Its shards stay until they are `unneeded`."""
        self._begun.discard(cursor)
        self._path(cursor).unlink(missing_ok=True)

    def _load(self, path: Path, source: PromptSource) -> Group:
        kept = sealed.load(path, _HEAD, _Kept, _WHAT, "it is sampled again")
        (prompt,) = source.at(kept.cursor, 1)
        if (kept.prompt, self._path(kept.cursor)) != (prompt.id, path):
            raise DataError(
                "the completions of a group belong to another prompt",
                where={"file": path, "group": kept.cursor},
                got=kept.prompt,
                expected=prompt.id,
            )
        if not kept.trajectories and any(own and own[0].prompt_token_ids != prompt.token_ids for own in kept.pieces):
            raise DataError(
                "the completions of a group belong to an older text of its prompt",
                where={"file": path, "group": kept.cursor},
                got=prompt.id,
            )
        self._kept.store.check_published(shards_of(all_pieces(kept.pieces)))
        left = 0 if kept.trajectories else len(unfinished(kept.pieces))
        state: State = "waiting" if left else "ready" if kept.verdicts else "judging"
        return Group(
            kept.cursor,
            kept.oldest,
            left,
            state,
            pieces=kept.pieces,
            trajectories=kept.trajectories,
            verdicts=kept.verdicts,
            version=kept.version,
        )

    def _path(self, cursor: int) -> Path:
        return self.folder / f"{cursor:06d}.group"
