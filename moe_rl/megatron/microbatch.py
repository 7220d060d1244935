"""A microbatch: some sequences packed end to end, as tensors on this rank's device.

Legend: T packed tokens, padding last; N completion tokens; B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from moe_rl.megatron.router import ReplaySeqParams
from moe_rl.replay.session import ReplaySession
from moe_rl.types import Sequence

# Packed lengths are rounded up to this, so that kernels see few sizes; every parallel.tensor divides it.
PAD_MULTIPLE = 8


def padded_length(tokens: int) -> int:
    """Rows of a microbatch with so many real tokens. Never 0: a rank without a sequence still takes part."""
    return max(PAD_MULTIPLE, -(-tokens // PAD_MULTIPLE) * PAD_MULTIPLE)


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """tokens, positions int64 [1, T]. lengths: of the packed sequences, the padding as one more.

    predicts int64 [N]: rows whose logits predict the completion tokens. targets int64 [N]: these tokens. sequence_ids
    int64 [N] in 0..B-1. rollout_logprobs float32 [N]. advantages float32 [B]. indices: which sequences of the batch.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    predicts: torch.Tensor
    targets: torch.Tensor
    sequence_ids: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    indices: tuple[int, ...]

    @property
    def real_tokens(self) -> int:
        """Tokens of the packed sequences, without the padding."""
        return sum(self.lengths[: len(self.indices)])

    def seq_params(self, session: ReplaySession | None, number: int) -> ReplaySeqParams:
        """What megatron gets beside the tokens. session None routes natively, uncompared."""
        bounds = torch.tensor((0, *self.lengths), dtype=torch.int32, device=self.tokens.device).cumsum(
            0, dtype=torch.int32
        )
        longest = max(self.lengths)
        return ReplaySeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=self.lengths,
            tokens=self.real_tokens,
            replay=None if session is None else session.handle(number),
        )


def pack(sequences: Seq[Sequence], indices: Seq[int], device: torch.device) -> Microbatch:
    """Pack sequences[i] for i in indices. Of each, all but the last token is fed: nothing is predicted after it."""
    fed, positions, lengths, predicts, targets, sequence_ids, logprobs = [], [], [], [], [], [], []
    for number, sequence in enumerate(sequences[i] for i in indices):
        everything = sequence.prompt_token_ids + sequence.token_ids
        start = len(fed) + len(sequence.prompt_token_ids) - 1
        predicts += range(start, start + len(sequence.token_ids))
        fed += everything[:-1]
        positions += range(sequence.forwarded)
        lengths.append(sequence.forwarded)
        targets += sequence.token_ids
        sequence_ids += [number] * len(sequence.token_ids)
        logprobs.append(torch.tensor(sequence.rollout_logprobs))
    padding = padded_length(len(fed)) - len(fed)
    if padding:
        fed += [0] * padding
        positions += range(padding)
        lengths.append(padding)

    def on_device(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    return Microbatch(
        tokens=on_device([fed], torch.int64),
        positions=on_device([positions], torch.int64),
        lengths=tuple(lengths),
        predicts=on_device(predicts, torch.int64),
        targets=on_device(targets, torch.int64),
        sequence_ids=on_device(sequence_ids, torch.int64),
        rollout_logprobs=torch.cat(logprobs).to(device, torch.float32) if logprobs else on_device([], torch.float32),
        advantages=on_device([sequences[i].advantage for i in indices], torch.float32),
        indices=tuple(indices),
    )
