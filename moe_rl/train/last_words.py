"""Tells why a rank ends: on its standard error, and in the file that torchrun gives to each rank.

torchrun prints the content of this file in its table of failures. `moe-rl train --ranks` reads the exit status there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

FILE = "TORCHELASTIC_ERROR_FILE"


def tell(text: str, status: int, *, aloud: bool = True) -> None:
    """Write why this rank ends with this exit status. aloud: also print it.

    Ignores failures to write: stderr may be a file on a full disk.
    """
    if aloud:
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")  # in one piece: other ranks write there too
            sys.stderr.flush()
    if file := os.environ.get(FILE):
        # The form that torch's ProcessFailure reads.
        message = {"message": text, "errorCode": status, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def statuses(folder: Path) -> list[int]:
    """Return the exit statuses in the error files of a log folder of torch's launcher, in rank order."""
    files = sorted(folder.glob("*/attempt_0/*/error.json"), key=lambda file: int(file.parent.name))
    return [json.loads(file.read_text(encoding="utf-8"))["message"]["errorCode"] for file in files]
