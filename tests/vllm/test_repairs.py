"""A family whose numbers vLLM gets wrong without a patch of ours is refused where that patch is not applied."""

from types import SimpleNamespace

import pytest
import torch

from moe_rl.errors import EngineError

AMX = {"has": True, "granted": True}
DENIED = {"has": True, "granted": False}
FLOAT = {"use_mla": True, "rope": {"rope_type": "yarn"}}
REPAIRS = {"0006", "0007", "0008", "0009", "0011"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_every_drafted_token_gets_the_temperature_and_cut_offs_of_its_request(dtype):
    """Patch 0011. Without it only int64, the dtype of the C++ function, was filled."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    if not current_platform.is_cpu():
        pytest.skip("a GPU runs the Triton kernel")
    current_platform.import_kernels()
    values = (torch.tensor([7, 0, 5, 13]) / (10 if dtype.is_floating_point else 1)).to(dtype)
    ends = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    for instead in (0, 1):
        expanded = torch.full((6,), 99, dtype=dtype)
        _expand_kernel_impl(expanded, values, ends, 0, instead)
        assert expanded.tolist() == [*[values[0]] * 2, instead, *[values[3]] * 3]


@pytest.mark.parametrize(
    "what, on_cpu, amx, patch",
    [
        ({"use_mla": True}, True, {}, "0006"),
        ({"use_mla": True}, False, {}, None),
        ({"use_mla": True, "rope": {"rope_type": "yarn"}}, True, {}, None),
        ({"use_mla": False}, True, {}, None),
        ({"architectures": ["GptOssForCausalLM"]}, True, {}, "0007"),
        ({"architectures": ["GptOssForCausalLM"]}, False, {}, "0007"),
        ({"architectures": ["GptOssForCausalLM"], "updates": None}, False, {}, None),
        (FLOAT, True, AMX, "0008"),
        (FLOAT, False, AMX, None),
        (FLOAT | {"dtype": torch.bfloat16}, True, AMX, None),
        ({"use_mla": False}, True, AMX, None),
        ({"use_mla": False}, True, DENIED, None),
        ({"use_mla": False, "dtype": torch.bfloat16}, True, DENIED, "0009"),
        ({"use_mla": False, "dtype": torch.bfloat16}, False, DENIED, None),
        ({"drafts": object()}, True, {}, "0011"),
        ({"drafts": object()}, False, {}, None),
    ],
)
def test_without_its_patch_a_family_is_refused(what, on_cpu, amx, patch, monkeypatch):
    from moe_rl.vllm.worker import refuse_unpatched

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx.get("has", False))
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: amx.get("granted", False))
    model = {"use_mla": False, "architectures": ["DeepseekV3ForCausalLM"], "dtype": torch.float32} | what
    text = SimpleNamespace(rope_parameters=model.pop("rope", {"rope_type": "default"}))
    config = SimpleNamespace(
        weight_transfer_config=model.pop("updates", "files"),
        speculative_config=model.pop("drafts", None),
        model_config=SimpleNamespace(hf_text_config=text, **model),
    )
    refuse_unpatched(config, REPAIRS, on_cpu=on_cpu)
    if patch is None:
        refuse_unpatched(config, set(), on_cpu=on_cpu)
        return
    with pytest.raises(EngineError, match=f"wrongly.*patch {patch}"):
        refuse_unpatched(config, set(), on_cpu=on_cpu)
    with pytest.raises(EngineError, match=f"wrongly.*patch {patch}"):
        refuse_unpatched(config, REPAIRS - {patch}, on_cpu=on_cpu)
