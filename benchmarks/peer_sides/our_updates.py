"""Makes replayed updates of a policy when it is asked to, on two ranks: `our_updates.py FOLDER DTYPE`, with the
policy in FOLDER/model and the tokens of its sequences in FOLDER/sequences.json. Every rank runs this file.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from peer_sides.turns import answer, asked
from updates import ReplayedUpdates, timed

RANKS = 2


def main() -> None:
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    sequences = json.loads((folder / "sequences.json").read_text())
    bench = ReplayedUpdates(folder, RANKS, lambda rank, vocab: [sequences[rank::RANKS]], dtype)

    from torch import distributed as dist

    from moe_rl.megatron import world

    update = partial(bench.update, bench.plans())
    if dist.get_rank():
        while world.broadcast(None, bool):
            timed(update)
    else:
        for _ in asked():
            world.broadcast(True, bool)
            answer(timed(update)[0])
        world.broadcast(False, bool)
    world.stop()


if __name__ == "__main__":
    main()
