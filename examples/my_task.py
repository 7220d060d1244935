import json
import random


def right(completion: str, numbers: list[int]) -> float:
    return float(completion.strip() == f"<answer>{sum(numbers)}</answer>")


def short(completion_token_ids: list[int], finish_reason: str) -> float:
    return float(finish_reason == "stop" and len(completion_token_ids) <= 6)


def write(name: str, seed: int, count: int) -> None:
    draw = random.Random(seed)
    with open(f"my_{name}.jsonl", "w") as file:
        for _ in range(count):
            numbers = [draw.randrange(1, 50), draw.randrange(1, 50)]
            row = {"question": "+".join(map(str, numbers)), "numbers": numbers, "carry": str(sum(numbers) > 49)}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write("train", seed=1, count=1000)
    write("heldout", seed=2, count=256)
