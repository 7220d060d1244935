"""Resolves the environment of a machine with NVIDIA GPUs: requirements/gpu.txt and requirements/gpu_built.txt.

python tools/dev/lock_gpu.py           # from setup.py's extras, keeping versions that still fit

This needs the package registry, but no GPU. Versions of requirements/cpu.txt are used where they fit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = [word for extra in ("gpu", "train", "serve", "dev") for word in ("--extra", extra)]
LOCK, BUILT = ROOT / "requirements/gpu.txt", ROOT / "requirements/gpu_built.txt"
# The only package without a wheel. It is compiled against the installed torch.
COMPILED = "transformer-engine-torch"
HEADER = """\
# The whole environment of a machine with NVIDIA GPUs, pinned: Python 3.12 on x86-64 Linux, CUDA 13.
# Made from setup.py by `make lock`; `make venv GPU=1` installs it. It resolves; no GPU has run it yet.

"""
BUILT_HEADER = """\
# Compiled against the torch of gpu.txt, once that is installed; takes nvcc. Made by `make lock`.

"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        # Flashinfer also accepts a cuda-python for CUDA 12, whose files would overwrite those of CUDA 13.
        bounds, lock = Path(folder, "bounds.txt"), Path(folder, "lock.txt")
        bounds.write_text("cuda-python>=13\n")
        # uv prefers the versions that are already in its output file.
        earlier = [path.read_text() for path in (LOCK, BUILT) if path.exists()]
        lock.write_text("\n".join(earlier or [(ROOT / "requirements/cpu.txt").read_text()]))
        subprocess.run(
            [sys.executable, "-m", "uv", "pip", "compile", "setup.py", *EXTRAS]
            + ["--constraint", bounds, "--output-file", lock, "--quiet", "--no-header", "--no-annotate"]
            + ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_31"],
            cwd=ROOT,
            check=True,
        )
        lines = lock.read_text().splitlines(keepends=True)
    compiled = [line for line in lines if line.startswith(f"{COMPILED}==")]
    LOCK.write_text(HEADER + "".join(line for line in lines if line not in compiled))
    BUILT.write_text(BUILT_HEADER + "".join(compiled))
    print(f"{len(lines)} packages in {LOCK.name} and {BUILT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
