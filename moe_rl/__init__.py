"""Provides routing replay and GSPO for mixture-of-experts models: vLLM samples, Megatron-core trains.

The names in `_HOMES` are the public API; docs/howto/library.md shows how to use each. `import moe_rl` imports no torch,
vLLM or Megatron: the module of a name is imported when the name is first used. `__init__.pyi` declares the types.
"""

from importlib import import_module

__version__ = "0.2.0"

_HOMES = {
    "record": "moe_rl.vllm.offline",
    "Sequence": "moe_rl.types",
    "read_model": "moe_rl.models.hf",
    "TraceStore": "moe_rl.trace",
    "MemoryTrace": "moe_rl.trace",
    "TraceSpec": "moe_rl.trace",
    "validate": "moe_rl.trace",
    "check_batch": "moe_rl.replay.batch_check",
    "audit": "moe_rl.replay.router_audit",
    "bisect": "moe_rl.comparison.bisection",
    "Computation": "moe_rl.comparison.bisection",
    "ThirdEngine": "moe_rl.comparison.third_engine",
    "row_places": "moe_rl.replay.router_audit",
    "replay_topk": "moe_rl.replay.choice",
    "to_megatron": "moe_rl.trace.adapters.outgoing",
    "to_nemo": "moe_rl.trace.adapters.outgoing",
    "to_prime_rl": "moe_rl.trace.adapters.outgoing",
    "to_skyrl": "moe_rl.trace.adapters.outgoing",
    "to_slime": "moe_rl.trace.adapters.outgoing",
    "to_verl": "moe_rl.trace.adapters.outgoing",
    "pack": "moe_rl.megatron.microbatch",
    "replay_spec": "moe_rl.megatron.specs",
    "with_replay": "moe_rl.megatron.specs",
    "replay_pass": "moe_rl.megatron.model",
    "ReplayPass": "moe_rl.replay.replay_pass",
    "token_logprobs": "moe_rl.objectives.logprobs",
    "advantages": "moe_rl.objectives.advantages",
    "policy_loss": "moe_rl.objectives.losses",
    "global_denominator": "moe_rl.objectives.losses",
    "reference_kl": "moe_rl.objectives.losses",
    "verl_loss": "moe_rl.objectives.loss_hooks",
    "slime_loss": "moe_rl.objectives.loss_hooks",
    "MismatchSums": "moe_rl.objectives.mismatch",
}
__all__ = list(_HOMES)

# The extra that a room needs; `train` for all others.
_EXTRAS = {"objectives": "objectives", "replay": "objectives", "vllm": "serve"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        value = globals()[name] = getattr(import_module(home), name)
    except (ImportError, SyntaxError) as error:
        what_lacks = import_module("moe_rl.errors").what_lacks
        if lacks := what_lacks(f"moe_rl.{name}", error, _EXTRAS.get(home.split(".")[1], "train")):
            raise ImportError(lacks) from error
        raise
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
