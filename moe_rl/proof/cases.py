"""Lists the layouts, schedules and precisions for which replay is proven, each with a fixed small batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from moe_rl.config import strict_yaml
from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.errors import About, ConfigError, Problem, describe

Mode = Literal["r3", "r2", "native", "observe"]

MICROBATCH_TOKENS = 40
# Settings of `train` that the batch, the model or the reference of a proof decides.
_FIXED = ("microbatch_tokens", "optimizer", "router_aux_loss", "expert_bias_rate", "lora")


@dataclass(frozen=True, slots=True)
class Case:
    """Describes one run on `ranks` processes.

    Attributes:
        parallel, train: What differs from the defaults of these config sections.
        mode: "r3" forces random routes. "r2" replays what other router weights chose. "native" routes freely. "observe"
            routes freely, and compares with the recorded routes.
        plan: Whether dispatch follows plans of the replayed routes.
        overlap_chunks: In how many chunks to compute while rows are exchanged; 0 turns this off.
        expert_copies: How many copies of other ranks' experts a rank may take; every copy that evens out rows is made.
        node_ranks: How many neighbouring ranks count as a node, for these copies; None for all.
        after_failure: Whether an update that fails in the middle of its schedule comes first.
    """

    ranks: int
    parallel: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    mode: Mode = "r3"
    plan: bool = True
    overlap_chunks: int = 0
    expert_copies: int = 0
    node_ranks: int | None = None
    after_failure: bool = False

    @property
    def name(self) -> str:
        """Return a name such as "TP2 EP2 PP2 recompute=uniform r2", unique among the cases with this number of
        ranks."""
        words = [self.layout_name]
        words += [self.mode] if self.mode != "r3" else []
        words += ["unplanned"] if not self.plan else []
        words += [f"overlap_chunks={self.overlap_chunks}"] if self.overlap_chunks else []
        words += [f"expert_copies={self.expert_copies}"] if self.expert_copies else []
        words += [f"node_ranks={self.node_ranks}"] if self.node_ranks else []
        words += ["after a failure"] if self.after_failure else []
        return " ".join(words)

    @property
    def layout_name(self) -> str:
        """Return the part of the name that describes the layout."""
        short = {
            "tensor": "TP",
            "context": "CP",
            "expert": "EP",
            "expert_tensor": "ETP",
            "pipeline": "PP",
            "virtual_pipeline": "VPP",
        }
        words = [f"{short[key]}{size}" for key, size in self.parallel.items() if key in short and size > 1]
        if lengths := self.parallel.get("layers_per_run"):
            words.append("+".join(map(str, lengths)))
        if self.copies > 1:
            words.append(f"DP{self.copies}")
        words += [key if value is True else f"{key}={str(value).lower()}" for key, value in self.train.items()]
        return " ".join(words) or "one rank"

    @property
    def copies(self) -> int:
        """Return the number of data-parallel replicas."""
        sharing = ("tensor", "context", "pipeline")
        return self.ranks // math.prod(self.parallel.get(key, 1) for key in sharing)

    @property
    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(**self.parallel)

    @property
    def train_config(self) -> TrainConfig:
        settings: dict[str, Any] = {"dtype": "float32", **self.train}
        return TrainConfig(
            microbatch_tokens=MICROBATCH_TOKENS, optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9), **settings
        )


def parse(overrides: Seq[str], ranks: int) -> Case:
    """Return the r3 case with these `parallel.a=b` and `train.a=b` overrides.

    Raises:
        ConfigError: An override is wrong. The message says what is wrong.
    """
    given: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, _, name = key.partition(".")
        if not equals or section not in given or not name or name in _FIXED:
            raise ConfigError(
                "a proof does not accept this override",
                where={"override": repr(text)},
                got=text,
                expected=f"parallel.NAME=VALUE or train.NAME=VALUE, and none of {', '.join(_FIXED)}",
            )
        given[section][name], _ = strict_yaml.parse(value, {"override": repr(text)})
    made: list[ParallelConfig | TrainConfig] = []
    problems: list[Problem] = []
    for make in (lambda: ParallelConfig(**given["parallel"]), lambda: Case(ranks, train=given["train"]).train_config):
        try:
            made.append(make())
        except ValidationError as error:
            for failure in error.errors():
                where: About = {"key": ".".join(map(str, failure["loc"])), "override": " ".join(overrides)}
                problem = describe("wrong value", where=where, got=failure["input"], expected=failure["msg"])
                problems += [problem] if failure["loc"] else failure["ctx"]["found"]  # a rule between several keys
    if problems:
        raise ConfigError(problems)
    parallel, train = made
    return Case(
        ranks,
        {name: getattr(parallel, name) for name in given["parallel"]},
        {name: getattr(train, name) for name in given["train"]},
    )


_INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}
_FULL = {"recompute": "uniform"}
_MOE = {"recompute": "moe"}
_OVERLAP = {"overlap_expert_parallel_comm": True}
_WHOLE = {"distributed_optimizer": False}

# Each layout is compared with the reference under forced random routes, and once more without replay, as the control.
LAYOUTS = [
    Case(1),
    Case(1, train=_FULL),
    Case(2),
    Case(2, {"expert": 2}),
    Case(2, {"expert": 2}, _FULL),
    # Both ranks of the tensor-parallel group hold whole experts, and each dispatches other tokens to them.
    Case(2, {"tensor": 2}),
    Case(2, {"tensor": 2, "expert": 2}),
    Case(2, {"tensor": 2, "expert": 2}, _FULL),
    Case(2, {"tensor": 2, "expert_tensor": 2}),
    # The ranks that share an expert's matrices have microbatches of different lengths.
    Case(2, {"expert_tensor": 2}),
    Case(2, {"context": 2}),
    Case(2, {"context": 2, "expert": 2}, _FULL),
    Case(2, {"pipeline": 2}),
    Case(2, {"pipeline": 2}, _FULL),
    Case(2, _INTERLEAVED, _FULL),
    # Recomputes runs of three and of one out of 4 layers.
    Case(2, {"expert": 2}, {"recompute": "uniform", "recompute_layers": 3}),
    # Recomputes the first of a stage's two layers.
    Case(2, {"pipeline": 2}, {"recompute": "block"}),
    Case(2, {"expert": 2}, {"recompute": "block", "recompute_layers": 3}),
    # Recomputes experts after the router has run the forward of later microbatches.
    Case(2, {"pipeline": 2}, _MOE),
    Case(2, {"tensor": 2, "expert": 2}, _MOE),
    Case(2, {"expert": 2}, _OVERLAP),
    # Has three microbatches of different lengths.
    Case(2, {"tensor": 2, "expert": 2}, _OVERLAP),
    Case(2, {"context": 2, "expert": 2}, _OVERLAP),
    Case(2, {}, _WHOLE),
    Case(2, {"expert": 2}, _WHOLE),
    Case(4, {"tensor": 2, "expert": 2}, _FULL),
    Case(4, {"tensor": 2, "expert": 4}),
    Case(4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    Case(4, {"expert": 2, "pipeline": 2}, _FULL),
    Case(4, {"tensor": 2, "expert": 2, "pipeline": 2}),
    Case(4, {"expert": 2, **_INTERLEAVED}),
    Case(4, {"expert": 2, **_INTERLEAVED}, _MOE),
    Case(4, {"expert": 2, **_INTERLEAVED}, _OVERLAP),
    Case(4, {"tensor": 2, "expert": 2}, _OVERLAP),
    # Has three microbatches, and an empty one that fills up a round of the interleaved schedule.
    Case(4, {"tensor": 2, "expert": 2, **_INTERLEAVED}, _OVERLAP),
    Case(4, {"expert": 2, "pipeline": 2}, _WHOLE),
    Case(4, {"pipeline": 4}),
    Case(4, {"context": 4, "expert": 4}),
    Case(4, {"context": 2, "expert_tensor": 2}),
    Case(4, {"context": 2, **_INTERLEAVED}, _FULL),
    Case(4, {"tensor": 2, "context": 2, "expert": 2}),
    Case(4, {"context": 2, "expert": 2, "pipeline": 2}, _FULL),
]
# R2 needs nothing from a layout that R3 does not need, so a few layouts of each kind are enough.
RECORDED = [
    Case(1, mode="r2"),
    Case(2, {"tensor": 2, "expert": 2}, _FULL, mode="r2"),
    Case(2, {"context": 2}, mode="r2"),
    Case(2, _INTERLEAVED, mode="r2"),
]
