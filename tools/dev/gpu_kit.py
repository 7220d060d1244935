"""Packs what a machine with a GPU and without network lacks, and prints the commands: `make gpu-kit`.

    python -m tools.dev.gpu_kit [--out build/gpu-kit] [--patient]

OUT/site has the packages for PYTHONPATH, OUT/kit.json their versions and size. The machine is expected to have Python
3.12, torch for CUDA 13 with what it needs, transformers and safetensors. Its versions may differ from our pins;
`gpu_day` writes them beside the results. With --patient, OUT/wheels also has vLLM, the pinned torch and what these
import, for a second day with the parts that need vLLM. Large wheels are in parts of 60 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from tools.dev.runs import ROOT

# What moe_rl, its tests and Megatron import, and torch and transformers do not bring.
NAMES = (
    "megatron-core", "msgspec", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "unidiff",
    "zstandard", "xxhash", "psutil", "pytest", "iniconfig", "pluggy", "pygments", "hypothesis", "sortedcontainers",
    "rich", "markdown-it-py", "mdurl",
)  # fmt: skip
LIMIT, PART = 64 << 20, 60_000_000
"""Most bytes that travel at once, and bytes of a part of a large wheel."""

_ELSEWHERE = ("nvidia-", "cuda-", "transformer-engine")  # with the machine's CUDA, or built there
_PLATFORM = (
    "--only-binary", ":all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64",
    "--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-kit"), metavar="FOLDER")
    parser.add_argument("--patient", action="store_true", help="also vLLM and torch, about 1 GB, in parts")
    options = parser.parse_args(arguments)
    shutil.rmtree(options.out, ignore_errors=True)
    pins = pinned(ROOT / "requirements/gpu.txt")
    tested = pinned(ROOT / "requirements/cpu.txt") | pins  # what only the tests import is in the first
    chosen = [f"{name}=={tested[name]}" for name in NAMES]
    _pip("install", "--no-compile", "--target", str(options.out / "site"), *_PLATFORM, *chosen)
    size = sum(file.stat().st_size for file in (options.out / "site").rglob("*") if file.is_file())
    if size > LIMIT:
        parser.error(f"the kit has {size / 2**20:.0f} MiB, more than the {LIMIT >> 20} that travel at once")
    kit = {"packages": chosen, "bytes": size, "parts": {}}
    if options.patient:
        wheels = options.out / "wheels"
        _pip("download", "--dest", str(wheels), *_PLATFORM, *carried(pins))
        kit["parts"] = {wheel.name: split(wheel) for wheel in sorted(wheels.glob("*.whl")) if _large(wheel)}
    (options.out / "kit.json").write_text(json.dumps(kit, indent=2) + "\n")
    print(told(options.out, size, patient=options.patient))
    return 0


def pinned(file: Path) -> dict[str, str]:
    """Return {name: version} of a requirements file, with names in lower case and with "-" for "_"."""
    lines = [line.partition("#")[0].strip().partition("==") for line in file.read_text().splitlines()]
    return {name.lower().replace("_", "-"): version for name, equals, version in lines if equals}


def carried(pins: dict[str, str]) -> list[str]:
    """Return what a patient kit brings besides, as requirements: all but the libraries of CUDA, and what is built."""
    names = [name for name in pins if not name.startswith(_ELSEWHERE) or name == "nvidia-ml-py"]
    return [f"{name}=={pins[name]}" for name in names]


def _pip(*arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        arguments[0],
        "-qq",
        "--no-deps",
    ]
    subprocess.run([*command, *arguments[1:]], check=True)


def _large(wheel: Path) -> bool:
    return wheel.stat().st_size > PART


def split(wheel: Path) -> str:
    """Replace a file by parts NAME.000, NAME.001 and so on. Return the sha256 of the whole."""
    whole = hashlib.sha256()
    with wheel.open("rb") as source:
        for number, part in enumerate(iter(lambda: source.read(PART), b"")):
            whole.update(part)
            wheel.with_name(f"{wheel.name}.{number:03}").write_bytes(part)
    wheel.unlink()
    return whole.hexdigest()


def told(out: Path, size: int, *, patient: bool) -> str:
    """Return the commands for the machine with the GPU."""
    lines = [
        f"The kit has {size / 2**20:.0f} MiB, in {out}/site. Copy it and this checkout to the machine, and run there:",
        "",
        f"  export PYTHONPATH=$PWD/{out}/site:$PWD",
        "  tools/dev/gpu_day.sh --out build/one --json build/one.json        # at most 8 minutes",
        "  tools/dev/gpu_day.sh --out build/two --with build/one/gpu_day.json   # only what failed",
    ]
    if patient:
        lines += [
            "",
            f"For the parts that need vLLM copy {out}/wheels too, whose large files are in parts, and first run there:",
            "",
            f"  (cd {out}/wheels; for f in *.whl.000; do cat ${{f%.000}}.* > ${{f%.000}} && rm ${{f%.000}}.0??; done)",
            f"  python3 -m pip install --no-deps --no-index --target build/site {out}/wheels/*.whl",
            "  export PYTHONPATH=$PWD/build/site:$PWD && python3 tools/apply_patches.py --apply",
            "  tools/dev/gpu_day.sh recording cuda_ipc sleep --out build/three --with build/two/gpu_day.json",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
