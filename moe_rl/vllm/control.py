"""Defines the messages between a recording vLLM server (server_control.py) and its clients (server.py).

They are JSON. Folders and files are named relative to the server's trace root, which the trainer may have mounted at
another path.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from moe_rl.errors import EngineError
from moe_rl.types import LONGEST_STOP_STRING, MOST_STOP_STRINGS, RouteRef

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_STOP_STRING)]
# A path below the trace root; "" is the root itself.
Below = Annotated[str, msgspec.Meta(max_length=1000, pattern=r"^(?!/)[^\x00]*$")]

GENERATE = "/inference/v1/generate"
"""vLLM's own route with token ids in and out."""

RUN_HEADER = "moe-rl-run"
"""HTTP header with the run's id. The server answers only the last run that adopted it."""

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

# The client's name of a request, with which it can abort it.
RequestName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16,32}$")]

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,256}", re.ASCII)


class Sink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of /moe_rl/abandon."""

    sink: str


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of /moe_rl/open. `folder` is the store that gets the shard."""

    sink: str
    folder: Below = ""


class Publish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of /moe_rl/publish; the answer is {key: RouteRef}. `sequences` maps a key to its forwarded token
    ids, or to none if its record is not awaited. With `keep_open` the shard remains open, and with `cut` its records so
    far are published, see Recorder.publish."""

    sink: str
    sequences: dict[str, list[TokenId]]
    aborted: list[str] = []
    keep_open: bool = False
    cut: bool = False


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of /moe_rl/release: how many requests must have arrived before any starts."""

    requests: Annotated[int, msgspec.Meta(ge=0)]


class LeaveRequests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of /moe_rl/leave: the requests of these names are aborted. Their streams end with the tokens so
    far. Unknown names are ignored: the request may have ended."""

    names: list[RequestName]


class RecordArguments(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Defines what to record of a request, see recording.py."""

    moe_rl_key: str
    moe_rl_sink: str
    moe_rl_parent: list[str | _Int64] | None = None
    moe_rl_start: _Count = 0


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constrains the tokens of a completion, see types.GenerateRequest.grammar."""

    structural_tag: str


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the vLLM sampling parameters that `sampling.parameters` and `transport.collect` set."""

    max_tokens: _Count
    temperature: float = 1.0
    top_k: _Int64 = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: _Int64 | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: _Count | None = None
    detokenize: bool = False
    stop: Annotated[list[StopString], msgspec.Meta(max_length=MOST_STOP_STRINGS)] = []
    skip_special_tokens: bool = False
    extra_args: RecordArguments | None = None
    structured_outputs: StructuredOutputs | None = None


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of GENERATE: one completion to sample. vLLM accepts more fields than this; the gate does not.

    `name`: for /moe_rl/leave; None for a request that is never aborted.
    """

    token_ids: list[TokenId]
    sampling_params: Parameters
    stream: bool = False
    priority: _Int64 = 0
    name: RequestName | None = None


class SaltedGeneration(msgspec.Struct, frozen=True, omit_defaults=True):
    """Defines the body that vLLM gets for a Generation. `cache_salt` is the weight version: prefixes are shared only
    within one."""

    token_ids: list[TokenId]
    sampling_params: Parameters
    stream: bool
    priority: _Int64
    cache_salt: str
    request_id: str | None = None


class Scoring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of /moe_rl/score; the answer is Scores.

    `sink` is the trace shard that gets the routes and is published; None records nothing. `folder` is as in Open.
    """

    runs: Annotated[
        list[Annotated[list[TokenId], msgspec.Meta(min_length=2)]], msgspec.Meta(min_length=1, max_length=256)
    ]
    sink: str | None = None
    folder: Below = ""


class Scores(msgspec.Struct, frozen=True):
    """Defines the answer of /moe_rl/score, with the fields of types.ScoredTokens."""

    logprobs: list[list[float]]
    routes: list[RouteRef]


class Challenge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines the body of /moe_rl/challenge; the answer is the content of the file `name` in `folder`.

    The server then writes the same content to `name`.answer next to that file.
    """

    folder: Below
    name: Annotated[str, msgspec.Meta(pattern=r"^\.challenge-[0-9a-f]{16}$")]


class Served(msgspec.Struct, frozen=True):
    """Defines the answer of /moe_rl/recording: what is served, and how it is recorded.

    Attributes:
        num_experts, top_k, layer_map: as in trace.record.TraceSpec.
        capture, support, router_logits_fraction, head: as in recording.Recording and the config's rollout.capture.
        reads_text: whether it finds stop strings.
        gpus: number of GPUs that share the weights.
        start: a random id of this server start.
        updates: attempted changes of the weights since the start.
        weight_version, weight_digest: those of the last complete weights that the server held; the digest of its first
            weights is "".
        weights_whole: whether the server still holds them.
    """

    moe_rl: str
    vllm: str
    trace_root: str
    model_fingerprint: str
    num_experts: int
    top_k: int
    layer_map: str
    vocab_size: int
    max_model_len: int
    dtype: str
    capture: str
    support: bool
    router_logits_fraction: float
    head: int
    reads_text: bool
    gpus: int
    start: str
    updates: int
    weight_version: int
    weight_digest: str
    weights_whole: bool


def read_token(path: Path) -> str:
    """Return a run's token. Raises EngineError if others may read the file, or it holds no token."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            status, text = os.fstat(file.fileno()), file.read(300).decode("ascii", "replace").strip()
    except OSError as error:
        raise EngineError("The run's token cannot be read", where={"file": path}, got=error.strerror) from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        mode = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        raise EngineError(
            "The run's token is readable by others", where={"file": path}, got=mode, expected="your own file, mode 600"
        )
    if not _TOKEN.fullmatch(text):
        raise EngineError(
            "The file holds no token", where={"file": path}, expected="32 to 256 letters, digits, - and _"
        )
    return text
