"""Writes docs/generated/chaos.md from the list of faults. `make generated` calls it."""

from __future__ import annotations

from tests.chaos.faults import FAULTS, Fault

PROMISES = {
    "P1": "A damaged record never reads as another one.",
    "P2": "Published data stays whole; an unfinished write leaves nothing.",
    "P3": "A resumed run equals, bit for bit, a run without interruption.",
    "P4": "When a rank dies, the run ends soon and names it.",
    "P5": "A sampler that dies, hangs or answers wrongly is named; the run trains on no incomplete group.",
    "P6": "No sampler uses weights that are stale, torn or under another name.",
    "P7": "Replay is exact, or it is refused before weights move.",
    "P8": "A verifier that fails gives no reward.",
    "P9": "An update with a value that is not finite changes nothing on any rank.",
    "P10": "A wrong config starts no process.",
    "P11": "The loss does not depend on the layout.",
    "P12": "Hostile input costs bounded time and memory.",
    "P13": "Control routes are local and require the run's token.",
    "P14": "No pickle that could run code is loaded.",
    "P15": "A run that must stop saves and ends in time; clocks may jump.",
    "P16": "An update learns from each of its sequences once, as it was sampled and judged.",
}
HEAD = """\
<!-- `make generated` writes this page from tests/chaos/faults.py. Change the list there. -->

# Planted faults: who notices, and what the message says

This page lists every fault that the tests plant. `make chaos` plants faults into real runs: the small policy, a real
vLLM engine, Megatron ranks. It takes 12 minutes on two cores without the scene "flight", of which 40 faults took 37
minutes in one run, on a machine busy with other work. A row fails unless its fault really did harm.

The last column names the test that plants the fault, without its folder `tests/`, or a scene in `tests/chaos`:

- lab: a run of one rank and a real engine gets one fault in each step. After the refusal the fault is removed and the
  step continues, so that one start covers many faults. Step 1 gets all those that only a run's first update shows.
- large lab: the same with the demo's batch, in which the alignment test can see single experts and single rows.
- layouts: two ranks run the training step on rollouts that a run has kept.
- chain: a run of two ranks and a real engine is ended by one fault after the other, and resumed after each. At the end
  its metrics, prompt ledger and tensors equal those of a run without faults.
- flight: an asynchronous run is ended by one strike after the other, each when a group is in a certain state, and
  resumed after each. At the end the prompt ledger proves that every prompt ended exactly once.
- folder: a run's folder is damaged while no process runs.

Quoted text in a message is literal; other text says what the message names.

"""


def page() -> str:
    """Return the page as markdown."""
    lines = [HEAD]
    for number, promise in PROMISES.items():
        rows = [fault for fault in FAULTS if fault.promise.split(", ")[0] == number]
        lines.append(f"## {number}. {promise}\n\n")
        lines.append("| fault | planted in | noticed by | message | what follows | shown by |\n")
        lines.append("|---|---|---|---|---|---|\n")
        lines += [_row(fault) for fault in rows]
        lines.append("\n")
    return "".join(lines).rstrip() + "\n"


def _row(fault: Fault) -> str:
    texts = [text.replace("{run}", "RUN").strip() for text in fault.says]
    said = ", ".join(texts if fault.scene == "tests" else [f'"{text}"' for text in texts])
    said += ", the harmed sequences" if fault.names_harmed else ""
    if fault.error:
        said = f"`{fault.error}`: {said}"
    tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in fault.tests)
    shown = tests or ("chain" if fault.scene == "second" else fault.scene)
    follows = f"{fault.soon}: {fault.after}"
    cells = (fault.name.removesuffix("$"), fault.planted, fault.notices, said, follows, shown)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


if __name__ == "__main__":
    print(page(), end="")
