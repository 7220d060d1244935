"""Keeps the groups that no step has consumed yet, so that a pool that starts again goes on with them.

`groups/000012.group` holds the completions of the prompt with cursor 12, and their verdicts if they are judged. Their
routes are in trace shards of the group's own, `group000012-0` and so on, one for each call that sampled a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moe_rl.errors import DataError, MoeRLError, describe
from moe_rl.rollout import sealed
from moe_rl.rollout.groups import Held, HeldState
from moe_rl.rollout.kept import group_shard_name, shard_group, shards_of
from moe_rl.rollout.pieces import all_pieces, unfinished
from moe_rl.rollout.trajectories import Trajectory
from moe_rl.tasks.prompts import PromptSource
from moe_rl.trace import TraceStore
from moe_rl.types import Completion, Verdict

_HEAD, _WHAT = "moe_rl group 1", "the completions of a group"


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """Holds the completions of one prompt.

    Attributes:
        prompt: its id.
        oldest: the version of the weights with which its first request began.
        version: the weights that the servers had when it was kept.
        verdicts: one for each completion; empty until it is judged.
        trajectories: what was played, if these are episodes. The sequences of each are its pieces.
    """

    cursor: int
    prompt: str
    oldest: int
    version: int
    pieces: list[list[Completion]]
    verdicts: list[Verdict]
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def held(self) -> Held:
        """Return what a pool needs to know of it."""
        left = 0 if self.trajectories else len(unfinished(self.pieces))
        state: HeldState = "waiting" if left else "ready" if self.verdicts else "judging"
        newest = max(one.newest_version for one in all_pieces(self.pieces))
        return Held(self.cursor, self.oldest, newest, left, state)


class GroupFiles:
    """Manages the group files in `folder`."""

    def __init__(self, folder: Path, store: TraceStore):
        self.folder, self.store = folder, store
        self._used: dict[int, int] = {}  # the largest number in the name of a group's shard, by cursor
        for name in store.shards():
            if (group := shard_group(name)) is not None:
                cursor, number = group
                self._used[cursor] = max(number, self._used.get(cursor, -1))

    def shard(self, cursor: int) -> str:
        """Return the name of a new shard for a group."""
        self._used[cursor] = self._used.get(cursor, -1) + 1
        return group_shard_name(cursor, self._used[cursor])

    def save(self, group: KeptGroup) -> None:
        """Write a group. The file appears complete or not at all. A power cut may damage it: then `load` deletes it."""
        sealed.save(self._path(group.cursor), _HEAD, group, _WHAT, synced=False)

    def load(self, source: PromptSource, unusable: list[str]) -> Iterator[KeptGroup]:
        """Read all groups, in the order of their cursors. A group that cannot be used is deleted.

        Args:
            source: the prompts.
            unusable: gets a message for each group that cannot be used.
        """
        for path in self.folder.glob("*.tmp"):
            path.unlink()
        for path in sorted(self.folder.glob("*.group"), key=lambda one: (len(one.name), one.name)):
            try:
                yield self._load(path, source)
            except MoeRLError as error:
                unusable.append(str(error))
                path.unlink()

    def remove(self, cursor: int) -> None:
        """Delete the file of a group, if there is one. Its shards stay."""
        self._path(cursor).unlink(missing_ok=True)

    def _load(self, path: Path, source: PromptSource) -> KeptGroup:
        group = sealed.load(path, _HEAD, KeptGroup, _WHAT, "it is sampled again")
        (prompt,) = source.at(group.cursor, 1)
        if (group.prompt, self._path(group.cursor)) != (prompt.id, path):
            raise DataError(
                describe(
                    "the completions of a group belong to another prompt",
                    where={"file": path, "group": group.cursor},
                    got=group.prompt,
                    expected=prompt.id,
                )
            )
        self.store.check_published(shards_of(all_pieces(group.pieces)))
        return group

    def _path(self, cursor: int) -> Path:
        return self.folder / f"{cursor:06d}.group"
