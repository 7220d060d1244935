"""Compares this trainer with what a user would take instead, in turns on two cores: `python benchmarks/peers.py
[--rounds 10] [--steps 4] [--step-rounds 3] [--json FILE]`.

The policy is that of configs/tiny_moe_cpu.yaml. The first four keys of the result are

    ratio_train_to_transformers_float32    trained tokens a second, ours / theirs: 1 or more is good
    ratio_train_to_transformers_bfloat16
    ratio_step_to_trl_short                seconds of a whole RL step, ours / theirs: 1 or less is good
    ratio_step_to_trl_long

Training is forward, backward and Adam on the sequences of one update of the demo. Ours replays routes on two ranks of
one thread; theirs is `transformers` with torch's AdamW in one process of two threads, on the same sequences in one
padded batch. Every round times both once, and the ratio is the median over the rounds.

An RL step is sampling, rewards, old log-probabilities and all updates. Theirs is TRL's GRPOTrainer with its own
generation, in one process of two threads, with the same policy, prompts, group size, number of updates, clipping and
precision. Ours is `moe-rl train` with all its proof, on two ranks that both have all experts, and with all completions
of a step in the sampler at once, as theirs. The demo divides the experts among its ranks and samples 256 at once; the
short case is also timed that way, without a key. The short case has the demo's answers. In the long case nothing
ends an answer before 100 tokens, because the token that ends it is one that the policy does not know. Every round makes
a run of each, and the ratio is that of the medians over all steps but the first of each run.

TRL and accelerate are installed into a folder of their own, once for each version of
benchmarks/peer_sides/requirements.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repository root, to import `tests`

from output import quartiles, tell
from peer_sides.turns import Side

from moe_rl.parent import torchrun
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
SIDES = Path(__file__).parent / "peer_sides"
DEMO = ROOT / "assets/tiny_moe"
TWO_THREADS = {"OMP_NUM_THREADS": "2"}
UNKNOWN_END = (319, "ry")  # the last token of the vocabulary, which no answer of the demo has


@dataclass(frozen=True, slots=True)
class Steps:
    """Says what RL steps both sides make. `steps` does not count the first, which warms up."""

    model: str
    data: str
    prompts: int
    group: int
    longest_answer: int
    updates: int
    dtype: str
    steps: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the updates")
    parser.add_argument("--step-rounds", type=int, default=3, help="rounds of the RL steps")
    parser.add_argument("--steps", type=int, default=4, help="RL steps that count in a run")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of both trainers' RL steps"
    )
    parser.add_argument(
        "--environment", type=Path, default=Path.home() / ".cache/moe_rl", help="where TRL is installed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    peers = environment(options.environment)
    ratios: dict[str, object] = {}
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(DEMO / "policy", folder / "model")
        tokens = write_sequences(folder)
        for dtype in ("float32", "bfloat16"):
            ours, theirs = updates(folder, dtype, options.rounds)
            rounds = [b / a for a, b in zip(ours, theirs, strict=True)]
            low, ratios[f"ratio_train_to_transformers_{dtype}"], high = quartiles(rounds)
            figures |= {
                f"train {dtype}, quartiles of the ratio": [round(low, 3), round(high, 3)],
                f"train {dtype}, our tokens a second": tokens / quartiles(ours)[1],
                f"train {dtype}, their tokens a second": tokens / quartiles(theirs)[1],
            }
        data = str(DEMO / "task/train.jsonl")
        short = Steps(str(folder / "model"), data, 64, 8, 12, 2, options.dtype, options.steps)
        long = replace(short, model=str(endless(folder / "long")), prompts=16, longest_answer=100)
        for case, todo in (("short", short), ("long", long)):
            seen = [
                (our_steps(todo, folder / f"{case}{n}"), trl_steps(todo, peers)) for n in range(options.step_rounds)
            ]
            if case == "short":
                as_demo = our_steps(todo, folder / "demo", "parallel.expert=2", "rollout.max_concurrent=256")
                figures["step short, our seconds with the demo's settings"] = quartiles(as_demo["seconds"])[1]
            middle = {}
            for side, runs in (("our", [ours for ours, _ in seen]), ("their", [theirs for _, theirs in seen])):
                low, middle[side], high = quartiles([one for run in runs for one in run["seconds"]])
                figures[f"step {case}, {side} seconds"] = middle[side]
                figures[f"step {case}, {side} seconds, quartiles"] = [round(low, 3), round(high, 3)]
                figures[f"step {case}, {side} tokens of an answer"] = quartiles([run["answer_tokens"] for run in runs])[
                    1
                ]
            ratios[f"ratio_step_to_trl_{case}"] = middle["our"] / middle["their"]
            for phase in ("sample", "routes", "logprobs", "train", "sync"):
                figures[f"step {case}, our seconds of {phase}"] = quartiles(
                    [one for ours, _ in seen for one in ours[phase]]
                )[1]
    tell(ratios | figures, options.json)
    return 0


def environment(folder: Path) -> dict[str, str]:
    """Install the peers into a folder for these versions of them, unless it is there, and return the environment."""
    wanted = SIDES / "requirements.txt"
    place = folder / f"peers-{hashlib.sha256(wanted.read_bytes()).hexdigest()[:12]}"
    if not place.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", unfinished, "-r", wanted], check=True)
            shutil.copytree(unfinished, place)
    return TWO_THREADS | {"PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}


def write_sequences(folder: Path) -> int:
    """Write the tokens of the sequences of one update of the demo, each with its right answer. Return their number."""
    from tokenizers import Tokenizer

    encode, sequences = Tokenizer.from_file(str(folder / "model/tokenizer.json")).encode, []
    for line in (DEMO / "task/train.jsonl").read_text().splitlines()[:256]:
        row = json.loads(line)
        answer = encode(f"<answer>{row['answer']}</answer><|end|>").ids
        sequences.append((encode(row["prompt"]).ids, answer))
    (folder / "sequences.json").write_text(json.dumps(sequences))
    return sum(len(prompt) + len(answer) for prompt, answer in sequences)


def updates(folder: Path, dtype: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of updates in turns, ours and those of transformers. Two rounds before them warm up."""
    rank = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    rank["PYTHONPATH"] = str(ROOT)
    ours = Side([str(SIDES / "our_updates.py"), str(folder), dtype], [rank | {"RANK": str(n)} for n in range(2)])
    theirs = Side([str(SIDES / "transformers_updates.py"), str(folder), dtype], [TWO_THREADS])
    with ours, theirs:
        seen = [(ours.work(), theirs.work()) for _ in range(rounds + 2)][2:]
    return [a for a, _ in seen], [b for _, b in seen]


def endless(folder: Path) -> Path:
    """Make a copy of the demo's policy whose answers do not end, and return its folder."""
    shutil.copytree(DEMO / "policy", folder)
    number, text = UNKNOWN_END
    for name, key, value in (
        ("config.json", "eos_token_id", number),
        ("generation_config.json", "eos_token_id", number),
        ("tokenizer_config.json", "eos_token", text),
    ):
        settings = json.loads((folder / name).read_text()) | {key: value}
        (folder / name).write_text(json.dumps(settings))
    return folder


def our_steps(todo: Steps, folder: Path, *settings: str) -> dict:
    """Make a run, and return the seconds of its steps and of their phases, without the first step."""
    command = [*torchrun(2), "tools/train_moe_rl.py", "--config", "configs/tiny_moe_cpu.yaml", f"run.runs_dir={folder}"]
    command += [f"run.steps={todo.steps + 1}", f"model.path={todo.model}", f"train.dtype={todo.dtype}"]
    command += [f"rollout.prompts_per_step={todo.prompts}", f"rollout.group_size={todo.group}"]
    command += [f"rollout.max_completion_tokens={todo.longest_answer}", f"train.updates_per_step={todo.updates}"]
    command += ["task.rewards.parity.function=peer_sides.rewards.parity", "task.rewards.parity.weight=1.0"]
    command += ["eval.every_steps=1000", "eval.prompts=8", "checkpoint.every_steps=1000"]
    command += ["parallel.expert=1", f"rollout.max_concurrent={todo.prompts * todo.group}", *settings]
    paths = os.pathsep.join([str(ROOT), str(SIDES.parent)])
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        raise SystemExit(f"our run failed:\n{run.stdout[-6000:]}")
    (lines,) = folder.glob("*/metrics.jsonl")
    steps = [row for row in map(json.loads, lines.read_text().splitlines()) if "time/step" in row][1:]
    phases = ("sample", "routes", "logprobs", "train", "sync")
    found = {phase: [row[f"time/{phase}"] for row in steps] for phase in phases}
    lengths = [row["rollout/completion_tokens_mean"] for row in steps]
    return {"seconds": [row["time/step"] for row in steps], "answer_tokens": sum(lengths) / len(lengths), **found}


def trl_steps(todo: Steps, peers: dict[str, str]) -> dict:
    """Make a run of GRPOTrainer, see `peer_sides/trl_steps.py`."""
    run = subprocess.run(
        [sys.executable, SIDES / "trl_steps.py", json.dumps(asdict(todo))],
        env={**os.environ, **peers},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
