"""Packs what a machine with a GPU and without network lacks, and prints the commands: `make gpu-kit`.

    python -m tools.dev.gpu_kit [--out build/gpu-kit] [--patient]

OUT/site has the packages for PYTHONPATH, OUT/kit.json their versions and size. The machine is expected to have Python
3.12, torch for CUDA 13 with what it needs, transformers and safetensors. Its versions may differ from our pins;
`gpu_day` writes them beside the results. With --patient, OUT/vllm.tar.zst.* also has vLLM and what it imports, in parts
of 60 MB, for a second day with the parts that need vLLM. Its code is left for an H100 or H200 alone, and it runs with
the machine's torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import zstandard

from tools.dev.one_architecture import emptied
from tools.dev.runs import ROOT

# What moe_rl, its tests and Megatron import, and torch and transformers do not bring.
NAMES = (
    "megatron-core", "msgspec", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "unidiff",
    "zstandard", "xxhash", "psutil", "pytest", "iniconfig", "pluggy", "pygments", "hypothesis", "sortedcontainers",
    "rich", "markdown-it-py", "mdurl",
)  # fmt: skip
LIMIT, PART = 64 << 20, 60_000_000
"""Most bytes that travel at once, and bytes of a part of what is larger."""

# What vLLM imports where only a model is served, and the machine does not have.
OF_VLLM = (
    "vllm", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2", "compressed-tensors", "depyf", "dill",
    "fastapi", "httpx2", "ijson", "importlib-metadata", "interegular", "jiter", "jsonschema",
    "jsonschema-specifications", "lark", "llguidance", "lm-format-enforcer", "loguru", "openai", "opentelemetry-api",
    "opentelemetry-sdk", "opentelemetry-semantic-conventions", "oss-harmony", "partial-json-parser",
    "prometheus-fastapi-instrumentator", "pybase64", "pydantic-settings", "python-dotenv", "python-json-logger",
    "python-multipart", "pyzmq", "referencing", "rpds-py", "setproctitle", "sniffio", "starlette", "watchfiles",
    "xgrammar",
)  # fmt: skip
# Attention for older GPUs, and a server that nothing here starts.
_LEFT_OUT = ("vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/vllm-rs")
_HOPPER = 90

# pip takes a wheel of exactly these: of glibc 2.35 and older, for which 2.17 has two names.
_GLIBCS = ("2014", *(f"_2_{minor}" for minor in range(17, 36)))
_PLATFORM = (
    "--only-binary", ":all:", "--python-version", "3.12",
    *(word for glibc in _GLIBCS for word in ("--platform", f"manylinux{glibc}_x86_64")),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-kit"), metavar="FOLDER")
    parser.add_argument("--patient", action="store_true", help="also vLLM, in parts")
    options = parser.parse_args(arguments)
    for name in ("site", "of_vllm"):  # of an earlier call; the folder may hold other things
        shutil.rmtree(options.out / name, ignore_errors=True)
    for file in (*options.out.glob("vllm.tar.zst*"), options.out / "kit.json"):
        file.unlink(missing_ok=True)
    pins = pinned(ROOT / "requirements/gpu.txt")
    tested = pinned(ROOT / "requirements/cpu.txt") | pins  # what only the tests import is in the first
    chosen = [f"{name}=={tested[name]}" for name in NAMES]
    _pip("install", "--no-compile", "--target", str(options.out / "site"), *_PLATFORM, *chosen)
    size = sum(file.stat().st_size for file in (options.out / "site").rglob("*") if file.is_file())
    if size > LIMIT:
        parser.error(f"the kit has {size / 2**20:.0f} MiB, more than the {LIMIT >> 20} that travel at once")
    kit: dict[str, Any] = {"packages": chosen, "bytes": size, "parts": []}
    if options.patient:
        site, of_vllm = options.out / "of_vllm", [f"{name}=={pins[name]}" for name in OF_VLLM]
        _pip("install", "--no-compile", "--target", str(site), *_PLATFORM, *of_vllm)
        kit["packages"] += of_vllm
        kit["parts"] = packed(site, options.out / "vllm.tar.zst")
    (options.out / "kit.json").write_text(json.dumps(kit, indent=2) + "\n")
    print(told(options.out, size, patient=options.patient))
    return 0


def pinned(file: Path) -> dict[str, str]:
    """Return {name: version} of a requirements file, with names in lower case and with "-" for "_"."""
    lines = [line.partition("#")[0].strip().partition("==") for line in file.read_text().splitlines()]
    return {name.lower().replace("_", "-"): version for name, equals, version in lines if equals}


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


def packed(site: Path, archive: Path) -> list[str]:
    """Pack a folder of packages into parts ARCHIVE.000, ARCHIVE.001 and so on, with code for one architecture, and
    remove it. Return the names of the parts."""
    for file in (file for pattern in _LEFT_OUT for file in site.glob(pattern)):
        file.unlink()
    for library in site.rglob("*.so"):
        library.write_bytes(emptied(library.read_bytes(), _HOPPER))
    with (
        archive.open("wb") as file,
        zstandard.ZstdCompressor(level=12, write_checksum=True).stream_writer(file) as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        tar.add(site, "site")
    shutil.rmtree(site)
    return split(archive)


def split(file: Path) -> list[str]:
    """Replace a file by parts NAME.000, NAME.001 and so on. Return their names."""
    parts = []
    with file.open("rb") as source:
        for number, part in enumerate(iter(lambda: source.read(PART), b"")):
            parts.append(file.with_name(f"{file.name}.{number:03}"))
            parts[-1].write_bytes(part)
    file.unlink()
    return [part.name for part in parts]


_UNPACK = (
    "import sys, tarfile, zstandard as z; unpacked = z.ZstdDecompressor().stream_reader(sys.stdin.buffer); "
    'tarfile.open(fileobj=unpacked, mode="r|").extractall("build", filter="tar")'
)


def told(out: Path, size: int, *, patient: bool) -> str:
    """Return the commands for the machine with the GPU."""
    there = Path("$PWD") / out
    lines = [
        f"The kit has {size / 2**20:.0f} MiB, in {out}/site. Copy it and this checkout to the machine, and run there:",
        "",
        f"  export PYTHONPATH={there}/site:$PWD",
        "  tools/dev/gpu_day.sh --out build/one --json build/one.json        # at most 8 minutes",
        "  tools/dev/gpu_day.sh --out build/two --with build/one/gpu_day.json   # only what failed",
    ]
    if patient:
        lines += [
            "",
            f"For the parts that need vLLM copy {out}/vllm.tar.zst.* too, and first run there:",
            "",
            f"  cat {out}/vllm.tar.zst.* | python3 -c '{_UNPACK}'",
            f"  export PYTHONPATH=$PWD/build/site:{there}/site:$PWD VLLM_USE_FLASHINFER_SAMPLER=0",
            "  python3 tools/apply_patches.py --apply",
            "  tools/dev/gpu_day.sh recording cuda_ipc sleep --out build/three --with build/two/gpu_day.json",
            "",
            "Processes that judge rewards see no PYTHONPATH. For `moe-rl train` name the folders in a file instead:",
            "",
            f"  printf '%s\\n' $PWD/build/site {there}/site $PWD \\",
            "    > $(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')/moe_rl_kit.pth",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
