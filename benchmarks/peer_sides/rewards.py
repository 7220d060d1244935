"""Gives a reward that differs inside a group also where no answer is right."""


def parity(completion: str) -> float:
    """Return 1.0 if the completion has an odd number of characters, else 0.0."""
    return float(len(completion) % 2)
