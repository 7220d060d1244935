"""Writes docs/internals/chaos.md from the list of faults.

python -m tests.chaos.table > docs/internals/chaos.md
"""

from __future__ import annotations

from tests.chaos.faults import FAULTS, Fault

PROMISES = {
    "P1": "A damaged record never reads as another one.",
    "P2": "What was published stays, whole; what was not leaves nothing.",
    "P3": "A resumed run is, bit for bit, the run that nobody interrupted.",
    "P4": "The death of a rank ends the run soon and is named.",
    "P5": "A sampler that dies, hangs or answers wrongly is named; no part of a group is trained on.",
    "P6": "Nothing is sampled from weights that are stale, torn or under another name.",
    "P7": "Replay is exact, or refused before weights move.",
    "P8": "A verifier that fails gives no reward.",
    "P9": "An update that is not finite changes nothing on any rank.",
    "P10": "A wrong config starts no process.",
    "P11": "The loss does not depend on the layout.",
    "P12": "Hostile input costs bounded time and memory.",
    "P13": "Control is local and wants the run's token.",
    "P14": "Nothing is unpickled that could run code.",
    "P15": "A run that is told to stop saves and ends in time; clocks may jump.",
}
HEAD = """\
# What was planted, and what was said

`make chaos` plants faults into real runs: the small policy, a real vLLM engine, Megatron ranks. It takes minutes on two
idle cores. A fault leaves a witness when it does harm, and a row fails without its witness. Rows that name a test are
planted by that test, which `make test` runs; the others say where in `tests/chaos` they are planted:

- lab: a run of one rank and a real engine has one fault in each step. When it was refused, the fault is taken away and
  the step goes on, so that one start shows many.
- layouts: the training step of two ranks, on rollouts that a run has kept.
- chain: a run of two ranks and a real engine is ended by one fault after the other and resumed after each. In the end
  its metrics, prompt ledger and tensors are those of the run that nobody touched.
- folder: a run's folder is damaged while nobody runs.

`python -m tests.chaos.table > docs/internals/chaos.md` writes this page from the list in `tests/chaos/faults.py`.

"""


def page() -> str:
    """The page as markdown."""
    lines = [HEAD]
    for number, promise in PROMISES.items():
        rows = [fault for fault in FAULTS if fault.promise.split(", ")[0] == number]
        lines.append(f"## {number}. {promise}\n\n")
        lines.append("| planted | where | who notices | what is said | how soon | and then | shown by |\n")
        lines.append("|---|---|---|---|---|---|---|\n")
        lines += [_row(fault) for fault in rows]
        lines.append("\n")
    return "".join(lines).rstrip() + "\n"


def _row(fault: Fault) -> str:
    said = " ... ".join(fault.says) + (" and the sequences" if fault.names_harmed else "")
    said = said.replace("{run}", "RUN").strip()
    if fault.error:
        said = f"`{fault.error}`: {said}"
    shown = (
        "<br>".join(f"`{test}`" for test in fault.tests)
        or f"`tests/chaos`, {'chain' if fault.scene == 'second' else fault.scene}"
    )
    cells = (fault.name.removesuffix("$"), fault.planted, fault.notices, said, fault.soon, fault.after, shown)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


if __name__ == "__main__":
    print(page(), end="")
