"""The kit for a machine with a GPU and without network: what it packs, and how large files travel."""

import struct
import subprocess
import sys

import pytest

from tools.dev import gpu_kit
from tools.dev.one_architecture import emptied
from tools.dev.runs import ROOT


def test_everything_that_it_packs_is_pinned():
    gpu = gpu_kit.pinned(ROOT / "requirements/gpu.txt")
    assert set(gpu_kit.NAMES) <= (gpu_kit.pinned(ROOT / "requirements/cpu.txt") | gpu).keys()
    assert set(gpu_kit.OF_VLLM) <= gpu.keys() and not set(gpu_kit.OF_VLLM) & {"torch", "triton", "transformers"}


def test_packages_travel_in_parts_and_come_out_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kit, "PART", 60)
    site, library = tmp_path / "packages", cuda_library(IMAGES)
    (site / "vllm/vllm_flash_attn").mkdir(parents=True)
    (site / "vllm/of_hopper.so").write_bytes(library)
    (site / "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so").write_bytes(library)
    (site / "data").write_bytes(bytes(range(256)))
    parts = gpu_kit.packed(site, tmp_path / "vllm.tar.zst")
    assert len(parts) > 2 and {file.name for file in tmp_path.iterdir()} == {*parts}
    packed = b"".join((tmp_path / part).read_bytes() for part in parts)
    subprocess.run([sys.executable, "-c", gpu_kit._UNPACK], input=packed, cwd=tmp_path, check=True)
    (there,) = (tmp_path / "build/site").rglob("*.so")
    assert there.name == "of_hopper.so" and there.read_bytes() == emptied(library, 90)
    assert (tmp_path / "build/site/data").read_bytes() == bytes(range(256))


IMAGES = [[(2, 80), (2, 90), (1, 90)], [(1, 75), (1, 80), (1, 100), (2, 80)], [(2, 100)]]
"""For each fat binary, (kind, architecture) of its images: PTX has the kind 1."""


def image(kind: int, architecture: int) -> bytes:
    """Code of 40 bytes under a header of 64."""
    header = struct.pack("<HHIQIIII", kind, 0x101, 64, 40, 0, 0, 0, architecture).ljust(64, b"h")
    return header + bytes([kind, architecture] * 20)


def cuda_library(fat_binaries) -> bytes:
    """An ELF file with a section of fat binaries, 8 bytes of padding behind each."""
    bodies = [b"".join(image(*one) for one in images) for images in fat_binaries]
    section = b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + bytes(8) for body in bodies)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    rows = [(0, 0, 0), (1, 64, len(section)), (12, 64 + len(section), len(names))]
    table = b"".join(struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in rows)
    head = struct.pack("<40xQ12xHH", 64 + len(section) + len(names), len(rows), 2)
    return head + section + names + table


def test_a_library_keeps_the_code_of_one_architecture_and_its_size():
    library = cuda_library(IMAGES)
    made = emptied(library, 90)
    assert len(made) == len(library) and made[:64] == library[:64]
    left, at = [], 64
    for images in IMAGES:
        magic, _, header, size = struct.unpack_from("<IHHQ", made, at)
        left.append(made[at + header : at + header + size])
        assert magic == 0xBA55ED50
        length = 104 * len(images)
        assert not any(made[at + header + size : at + header + length + 8])
        at += header + length + 8
    assert left == [image(2, 90), image(1, 80), image(2, 100)[:64] + bytes(40)]
    assert made[at:] == library[at:] and emptied(b"\x7fELF".ljust(200, b"\0"), 90) == b"\x7fELF".ljust(200, b"\0")


@pytest.mark.parametrize("at", [64, 64 + 16])
def test_a_format_that_is_not_known_is_refused(at):
    library = bytearray(cuda_library(IMAGES))
    library[at] ^= 0xFF
    with pytest.raises(ValueError, match="padding|unknown image"):
        emptied(bytes(library), 90)


def test_a_kit_that_is_too_large_is_refused(tmp_path, monkeypatch, capsys):
    def pip(*arguments):
        (tmp_path / "kit/site").mkdir(parents=True)
        (tmp_path / "kit/site/large.py").write_bytes(bytes(2000))

    monkeypatch.setattr(gpu_kit, "_pip", pip)
    assert gpu_kit.main(["--out", str(tmp_path / "kit")]) == 0
    assert f"{tmp_path}/kit/site" in capsys.readouterr().out
    monkeypatch.setattr(gpu_kit, "LIMIT", 1000)
    with pytest.raises(SystemExit):
        gpu_kit.main(["--out", str(tmp_path / "kit")])
    assert "more than" in capsys.readouterr().err
