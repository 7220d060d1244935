import torch

from moe_rl import MismatchSums, advantages, global_denominator, policy_loss, reference_kl

# Two prompts, two completions each; the verifier of the last one failed. Lengths are in completion tokens.
rewards, groups, lengths = [1.0, 0.0, 1.0, None], [0, 0, 1, 1], [3, 2, 1, 2]
worth = advantages("group_std", rewards, groups, lengths)
print("advantages", [value if value is None else round(value, 4) for value in worth])

# What is trained on: the completions with an advantage, their tokens end to end.
kept = [i for i, value in enumerate(worth) if value is not None]
sequence_ids = torch.tensor([0, 0, 0, 1, 1, 2])
rollout = torch.tensor([-0.10, -0.70, -0.01, -0.30, -1.20, -0.05])  # of the sampler
old = rollout + torch.tensor([0.0, 0.02, 0.0, -0.01, 0.01, 0.0])  # of the trainer before the update
logprobs = (old + 1e-4 * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 0.0])).requires_grad_()  # of the trainer now

result = policy_loss(
    "gspo",
    logprobs,
    old,
    torch.tensor([value for value in worth if value is not None]),
    sequence_ids,
    rollout_logprobs=rollout,
    denominator=global_denominator("gspo", [lengths[i] for i in kept], max_tokens=8),
    clip_low=3e-4,
    clip_high=4e-4,
)
kl = reference_kl(logprobs, rollout, sequence_ids, len(kept), estimator="k3")  # the reference here: the sampler
(result.loss + 0.1 * kl).backward()
assert logprobs.grad is not None
print(f"loss {result.loss.item():.6f}, clipped {result.clip_events.item():.0f}, KL {kl.item():.6f}")
print("gradient", [round(value, 3) for value in logprobs.grad.tolist()])

measured = MismatchSums.of(old, rollout, sequence_ids, sequences=len(kept)).metrics()
print({name: round(measured[name], 6) for name in ("k1", "k3", "abs_max", "tokens")})
