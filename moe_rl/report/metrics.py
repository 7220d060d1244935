"""Every number a run reports: its name, unit, direction, meaning, and what a bad value means.

A list to read, in the order of docs/metrics.md; `registry.py` holds runs to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neutral", "must be 0", "must be 1", "must equal routing/expected"]
When = Literal["every step", "when measured", "evaluation"]

Mode = Literal["r3", "r2", "off"]

FAMILY = "<name>"
MODES: tuple[Mode, ...] = ("r3", "r2", "off")
REPLAYED: tuple[Mode, ...] = ("r3", "r2")


@dataclass(frozen=True, slots=True)
class Metric:
    """One reported number. A key ending in `<name>` stands for a family, one member per name.

    when: "every step" is required in each training line, "when measured" may be absent from it, "evaluation" belongs to
    evaluation lines only. modes: the values of replay.mode under which it exists; under others it is refused.
    """

    key: str
    unit: str
    better: Better
    meaning: str
    bad: str
    when: When = "every step"
    modes: tuple[Mode, ...] = MODES

    @property
    def family(self) -> bool:
        return self.key.endswith(FAMILY)


ALL = (
    # What the policy earns.
    Metric(
        "reward/mean",
        "reward",
        "higher",
        "Mean weighted reward of the scored completions of this step.",
        "Flat while pass rate is low: nothing to learn from (see group/zero_variance_fraction), or the rate is too "
        "low.",
    ),
    Metric(
        "reward/pass_rate",
        "fraction",
        "higher",
        "Fraction of the scored training completions whose task.pass_reward is 1, at the sampling temperature.",
        "Rises while eval/pass_rate does not: the policy learns the training prompts by heart or games the reward.",
    ),
    Metric(
        "reward/failed_verdicts",
        "count",
        "must be 0",
        "Verifications that raised, hung or died. They carry no reward and are left out of group statistics.",
        "Above 0 the verifier, not the policy, is at fault. The run ends above task.max_failed_fraction.",
    ),
    Metric(
        "reward/part/<name>",
        "reward",
        "higher",
        "Mean of one reward function before its weight.",
        "One part rises while the part that matters falls: the weights invite gaming.",
    ),
    Metric(
        "reward/overlong_penalty",
        "reward",
        "higher",
        "Mean of what task.overlong adds to the reward of a sampled completion, 0 or below. Not in reward/mean. "
        "Only with task.overlong.",
        "Far below 0: most completions come near rollout.max_completion_tokens.",
        "when measured",
    ),
    Metric(
        "reward/kl_penalty",
        "reward",
        "higher",
        "Mean of what the KL to the reference adds to the reward of a trained sequence: -objective.kl_coef x its "
        "sum over the completion. Not in reward/mean. Only with objective.kl_in: reward.",
        "As large as the rewards differ: staying near the reference is what is learned.",
        "when measured",
    ),
    # What the sampler produced.
    Metric(
        "rollout/sequences",
        "count",
        "neutral",
        "Completions sampled in this step. All of them are in the reward/ and rollout/ means, trained on or not.",
        "Fewer than prompts_per_step x group_size: completions were lost.",
    ),
    Metric(
        "rollout/completion_tokens_mean",
        "tokens",
        "neutral",
        "Mean completion length, the stop token included.",
        "A steady climb to max_completion_tokens without reward: rambling. A fall to a few tokens: collapse.",
    ),
    Metric(
        "rollout/truncated_fraction",
        "fraction",
        "lower",
        "Fraction of completions cut at max_completion_tokens.",
        "High: the limit, not the policy, decides the reward.",
    ),
    Metric(
        "rollout/weight_version",
        "version",
        "neutral",
        "Version of the weights that sampled this step's completions.",
        "Stands still while optim/updates grows: the sync does not reach the sampler.",
    ),
    Metric(
        "rollout/lost_servers",
        "servers",
        "lower",
        "Of rollout.servers those that failed since the run began, and are used no more.",
        "Above 0: the others sample more; stderr says why. Above rollout.max_lost_servers the run ends.",
        when="when measured",
    ),
    Metric(
        "group/zero_variance",
        "count",
        "lower",
        "Sampled prompt groups whose completions all earned the same. What compares rewards within groups learns "
        "nothing from them.",
        "Near the number of groups: the prompts are too easy or too hard.",
    ),
    Metric(
        "group/zero_variance_fraction",
        "fraction",
        "lower",
        "The same as a fraction of the groups.",
        "Near 1: no gradient is left. It rises by itself as the task is solved.",
    ),
    Metric(
        "group/sampled",
        "count",
        "lower",
        "Prompt groups sampled in this step, in all rounds. Only with rollout.dynamic_sampling_rounds > 1.",
        "Always prompts_per_step x dynamic_sampling_rounds: see group/lacking.",
        "when measured",
    ),
    Metric(
        "group/discarded",
        "count",
        "lower",
        "Of these, groups that were not trained on: rewards all the same, or more than were needed. Only with "
        "rollout.dynamic_sampling_rounds > 1.",
        "Most of what is sampled: choose prompts of another difficulty.",
        "when measured",
    ),
    Metric(
        "group/lacking",
        "count",
        "must be 0",
        "Groups with differing rewards that were still missing to prompts_per_step when the rounds ran out. The "
        "step trains on fewer; if it found none, on groups without a difference, as without dynamic sampling. Only "
        "with rollout.dynamic_sampling_rounds > 1.",
        "Above 0: the prompts are too easy or too hard, or the rounds too few.",
        "when measured",
    ),
    # Do sampler and trainer agree on the policy? Same tokens, same weights, two engines.
    Metric(
        "policy_kl/k1",
        "nats/token",
        "neutral",
        "Mean of (sampler - trainer logprob) on sampled tokens: the k1 estimate of KL(rollout || trainer). The "
        "trainer runs as it trains: under replay when replay.mode is r3.",
        "Far from 0, or the same sign at every step: a systematic difference (temperature, dtype, wrong weights).",
    ),
    Metric(
        "policy_kl/k3",
        "nats/token",
        "lower",
        "Mean of (r - 1 - log r), r = trainer / sampler probability: the k3 estimate of KL(rollout || trainer). The "
        "trainer runs as it trains.",
        "Growing over the run is the early sign of collapse: the importance ratio is becoming noise.",
    ),
    Metric(
        "policy/extreme_fraction",
        "fraction",
        "lower",
        "Fraction of sampled tokens that one engine finds more than twice as likely as the other, F(2).",
        "Above 1e-3 a few tokens rule the gradient; above 0.1 collapse is near.",
    ),
    Metric(
        "policy/extreme_fraction_5",
        "fraction",
        "lower",
        "The same for more than five times, F(5).",
        "Above 0 at all: look at policy/logratio_abs_max.",
    ),
    Metric(
        "policy/logratio_abs_p50",
        "nats",
        "lower",
        "Median of |trainer - sampler logprob| over sampled tokens, at most 2.4% too high; up to 1e-7 counts as 0.",
        "Grows while policy/logratio_abs_p99 stands still: a difference of all tokens, as of precision.",
    ),
    Metric(
        "policy/logratio_abs_p99",
        "nats",
        "lower",
        "The same as the 99th percentile.",
        "Grows while the median stands still: a difference of some tokens, as of routes.",
    ),
    Metric(
        "policy/logratio_abs_max",
        "nats",
        "lower",
        "Largest |trainer - sampler logprob| of any sampled token.",
        "Several nats on one token: one position differs entirely. Look for a wrong route or a shifted token.",
    ),
    Metric(
        "policy/perplexity_train",
        "perplexity",
        "neutral",
        "Mean over sequences of exp(-mean trainer logprob of its sampled tokens).",
        "Rises while policy/perplexity_rollout does not: the trainer no longer knows what was sampled.",
    ),
    Metric(
        "policy/perplexity_rollout",
        "perplexity",
        "neutral",
        "The same of the sampler's logprobs.",
        "Near 1: the policy has become deterministic and has nothing left to explore.",
    ),
    Metric(
        "policy/log_perplexity_diff",
        "nats/token",
        "neutral",
        "Mean over sequences of (mean sampler logprob - mean trainer logprob): policy_kl/k1 with every sequence "
        "weighing the same.",
        "Of the other sign than policy_kl/k1: long and short sequences differ otherwise.",
    ),
    Metric(
        "policy/log_perplexity_abs_diff",
        "nats/token",
        "lower",
        "Mean over sequences of the absolute value of that difference.",
        "Much above |policy/log_perplexity_diff|: single sequences are off in both directions. Of the size of a "
        "GSPO clip range: the clipping cuts off mismatch, not updates.",
    ),
    Metric(
        "policy/chi2_token",
        "chi2",
        "lower",
        "Mean over tokens of (trainer / sampler probability)^2, less 1: chi-square of the trainer from the sampler.",
        "Above 0.1 the variance of token importance weights begins to tell.",
    ),
    Metric(
        "policy/chi2_sequence_product",
        "chi2",
        "lower",
        "Mean over sequences of the square of the product of its tokens' ratios, less 1: of whole sequences.",
        "Explodes with length even where each token is fine: no importance weight of whole sequences will do.",
    ),
    Metric(
        "policy/chi2_sequence_geometric",
        "chi2",
        "lower",
        "The same of the geometric mean of its tokens' ratios, which is the ratio GSPO clips. Not the number above, "
        "though both are called sequence-level elsewhere.",
        "Above 0.1: whole sequences drift, not single tokens.",
    ),
    Metric(
        "policy/effective_sample_fraction",
        "fraction",
        "higher",
        "(sum of w)^2 / (tokens x sum of w^2), w the tokens' untruncated trainer / sampler ratios: the share of the "
        "tokens that an importance-weighted mean has the worth of.",
        "Below 0.9: few tokens rule the mean.",
    ),
    Metric(
        "policy/entropy",
        "nats/token",
        "neutral",
        "Mean entropy of the trainer's distribution of each completion token, before the step's first update, at "
        "the sampling temperature and over the tokens that rollout.keep_sampling_mask leaves. With "
        "objective.old_logprobs: sampler it is of the first update's share of the step.",
        "Falls to 0 while rewards still rise: exploration is over. Rises without end: objective.entropy_coef is too "
        "large.",
    ),
    Metric(
        "policy_kl/k1_native",
        "nats/token",
        "neutral",
        "policy_kl/k1 with the trainer routing natively, on the same tokens, weights and sampler logprobs.",
        "See policy_kl/k1.",
        "when measured",
    ),
    Metric(
        "policy_kl/k3_native",
        "nats/token",
        "lower",
        "policy_kl/k3 with the trainer routing natively, on the same tokens, weights and sampler logprobs. Compare "
        "it with policy_kl/k3 of the same step only.",
        "Not above policy_kl/k3: replay removes nothing here. Precision or kernels, not routes, then differ.",
        "when measured",
    ),
    Metric(
        "policy/extreme_fraction_native",
        "fraction",
        "lower",
        "policy/extreme_fraction with the trainer routing natively.",
        "See policy/extreme_fraction.",
        "when measured",
    ),
    # Do sampler and trainer agree on the routes?
    Metric(
        "routing/shadow_mismatch",
        "fraction",
        "lower",
        "Fraction of (token, MoE layer) positions where the set of experts that the trainer would choose itself, "
        "inside the replayed forward, differs from the recorded set. What is left is the disagreement of each "
        "router alone; the cascade from earlier layers is gone.",
        "As high as routing/native_mismatch: the routers themselves disagree. Look at dtype, gate weights, sync.",
        modes=("r3",),
    ),
    Metric(
        "routing/shadow_overlap",
        "fraction",
        "higher",
        "Of the recorded experts, those that the trainer would choose itself inside the replayed forward; mean over "
        "(token, MoE layer) positions.",
        "Far below 1 - routing/shadow_mismatch / top-k: where sets differ, they differ in several experts.",
        modes=("r3",),
    ),
    Metric(
        "routing/shadow_margin",
        "score",
        "lower",
        "How far the least of the recorded experts scores below the trainer's own last choice, inside the replayed "
        "forward: mean over (token, MoE layer) positions, 0 where the sets agree. In what the router ranks by: nats "
        "of its logits under softmax, biased scores under sigmoid.",
        "Grows: not ties near the edge of the top-k fall otherwise, but clear choices.",
        modes=("r3",),
    ),
    Metric(
        "routing/shadow_mismatch_layer/<name>",
        "fraction",
        "lower",
        "routing/shadow_mismatch of one MoE layer, by its global number.",
        "One layer far above its neighbours: its gate's weights or precision differ between the engines.",
        "when measured",
        modes=("r3",),
    ),
    Metric(
        "routing/native_mismatch",
        "fraction",
        "lower",
        "The same in a forward that routes natively: local disagreement and the cascade it sets off.",
        "A few percent to 0.1 is usual for bf16 engines. Near 1: the weights differ or the trace is shifted.",
        "when measured",
    ),
    Metric(
        "routing/native_token_mismatch",
        "fraction",
        "lower",
        "Fraction of tokens with at least one MoE layer whose set differs, in a forward that routes natively.",
        "Grows with depth; near 1 in deep models even when routing/native_mismatch is small.",
        "when measured",
    ),
    Metric(
        "routing/native_overlap",
        "fraction",
        "higher",
        "routing/shadow_overlap in a forward that routes natively.",
        "See routing/shadow_overlap.",
        "when measured",
    ),
    Metric(
        "routing/native_margin",
        "score",
        "lower",
        "routing/shadow_margin in a forward that routes natively.",
        "See routing/shadow_margin.",
        "when measured",
    ),
    Metric(
        "routing/native_mismatch_layer/<name>",
        "fraction",
        "lower",
        "routing/native_mismatch of one MoE layer, by its global number.",
        "One layer far above its neighbours: its gate's weights or precision differ between the engines.",
        "when measured",
        modes=("r2", "off"),
    ),
    Metric(
        "routing/applied_mismatch",
        "count",
        "must be 0",
        "(sequence, MoE layer) pairs with a row that was dispatched to other experts than recorded, by a checksum "
        "over request, position, token, layer and experts. An integrity check: 0 says that replay did what it "
        "should, not that it helped.",
        "Above 0 replay is broken: the run ends.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/coverage",
        "fraction",
        "must be 1",
        "Fraction of (trained token, MoE layer) positions with a recorded route that may be replayed.",
        "Below 1 some positions are routed natively, as replay.missing and replay.stale allow.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/fallback_positions",
        "count",
        "must be 0",
        "(trained token, MoE layer) positions routed natively because their routes are missing or stale. The run "
        "ends above replay.max_fallback_fraction.",
        "Above 0: the sampler did not record everything. See engine.log.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/dropped_sequences",
        "count",
        "must be 0",
        "Sequences not trained on because routes are missing (replay.missing: drop). The run ends above "
        "replay.max_fallback_fraction.",
        "Above 0: the sampler did not record everything. See engine.log.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/stale_tokens",
        "count",
        "neutral",
        "Trained tokens whose routes older weights chose (replay.stale).",
        "Most of the tokens: the sampler lags behind.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/load_excess",
        "fraction",
        "lower",
        "(token, expert) pairs of the fullest rank of parallel.expert / the mean of these ranks, minus 1: of the "
        "sums over microbatches and layers, by the sampler's routes (under r2 the trainer's own differ a little).",
        "Every layer waits for the fullest rank. Try train.packing: load. It cannot even out what is popular in the "
        "whole batch.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/packed_by_length",
        "count",
        "neutral",
        "Updates of the step with the microbatches of packing by length: all, but under train.packing: load only "
        "those for which no more even ones were found.",
        "Not 0 under train.packing: load: popular experts are the same in all sequences, or there is one round of "
        "microbatches. Placement can help, packing cannot.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/consumed",
        "count",
        "must equal routing/expected",
        "Takings of recorded routes in this step, one for each (microbatch, layer) and pass over it, as counted by "
        "the replay ledger.",
        "Fewer: a layer was skipped. More: one was replayed twice.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/expected",
        "count",
        "neutral",
        "Takings that this step owed: every (microbatch, layer) exactly once forward and once per recomputation.",
        "Differs between steps of equal shape: the plan changed.",
        modes=REPLAYED,
    ),
    Metric(
        "routing/planned_fraction",
        "fraction",
        "higher",
        "Fraction of the dispatches of (microbatch, MoE layer) under replay, recomputations included, that followed "
        "a plan made of the routes beforehand: no exchange of counts and no wait of the host in these layers.",
        "Below 1 with replay.plan: some rank's microbatch has rows without a route (replay.missing, replay.stale).",
        modes=REPLAYED,
    ),
    Metric(
        "routing/peak_rows",
        "count",
        "neutral",
        "Most rows, (token, expert) pairs with padding among them, that the experts of any rank get in a layer of a "
        "microbatch, known from the plans before the first pass under them; 0 without plans.",
        "Memory for activations follows it. replay.max_rows bounds it; --plan --trace tells it of recorded batches "
        "beside the worst case.",
        modes=REPLAYED,
    ),
    # Where experts lie.
    Metric(
        "placement/excess_before",
        "fraction",
        "lower",
        "Of the routes that a placement of experts was planned from: (token, expert) pairs of the fullest rank of "
        "parallel.expert / the mean of these ranks, minus 1, of the sums over steps and layers, with experts where "
        "they were. Only with placement.experts: traced, in steps with a plan.",
        "As high as before the last plan: popularity changes faster than placement.every_steps.",
        "when measured",
    ),
    Metric(
        "placement/excess_after",
        "fraction",
        "lower",
        "The same with experts where the plan puts them: what routing/load_excess would be if every microbatch had "
        "the mean popularity.",
        "Not below placement/excess_before: nothing was worth a move, or single experts are more than a rank's share.",
        "when measured",
    ),
    Metric(
        "placement/experts_moved",
        "count",
        "neutral",
        "Experts that went to another rank, of all layers.",
        "Many in every plan, for little: raise placement.min_gain or lower placement.max_moved.",
        "when measured",
    ),
    # The update.
    Metric(
        "objective/loss",
        "loss",
        "neutral",
        "The objective as minimised. It does not measure progress: with centred advantages and a mean over "
        "sequences it is near 0 by construction, and under cispo, dppo_tv and minirl it has the log-likelihood in "
        "it, whose gradient alone counts.",
        "Non-finite: the update is skipped on all ranks.",
    ),
    Metric(
        "objective/clip_fraction",
        "fraction",
        "neutral",
        "Fraction of the tokens (gspo: of the sequences) whose gradient the loss took away: by clipping the ratio "
        "(gspo, gspo_token, grpo, dr_grpo, dapo, gmpo, decoupled) or by masking (dppo_tv, minirl). Where the loss "
        "does not do that: whose weight it truncated (cispo) or whose gate is below 1/2 (sapo). Advantage 0, "
        "or weight 0 by a correction, counts as untouched.",
        "Near 1: the policy moves too far in a step. 0 with one update per step and old_logprobs=trainer is expected.",
    ),
    Metric(
        "objective/ratio_mean",
        "ratio",
        "neutral",
        "Mean over the same tokens or sequences of the ratio that is clipped, masked or faded, before that: new "
        "policy / old policy (objective.old_logprobs). gspo: of the sequence; gspo_token: of the token's sequence; "
        "otherwise of the token alone, without the weight to the sampler that minirl and decoupled have beside it.",
        "Far from 1: the old logprobs do not belong to these tokens or weights.",
    ),
    Metric(
        "objective/zero_advantage_fraction",
        "fraction",
        "lower",
        "Fraction of the trained sequences whose advantage is exactly 0: they teach nothing.",
        "Near 1: rewards do not differ where objective.advantage compares them.",
    ),
    Metric(
        "correction/weight_mean",
        "ratio",
        "neutral",
        "Mean weight of a token by objective.corrections and objective.off_policy_delta, zeros among them; of the "
        "step's updates. Like the others of this room only where one of them is set.",
        "Far from 1: the loss is scaled by the mismatch. Look at policy_kl/k3.",
        "when measured",
    ),
    Metric(
        "correction/zero_token_fraction",
        "fraction",
        "lower",
        "Fraction of the tokens whose weight is 0: rejected, masked or vetoed, alone or with their sequence. They "
        "stay in the denominator.",
        "Above a few percent: the bounds are narrower than the mismatch, and most of what was sampled is lost.",
        "when measured",
    ),
    Metric(
        "correction/truncated_token_fraction",
        "fraction",
        "lower",
        "Fraction of the tokens whose ratio, of themselves or of their sequence, a truncate rule lowered, rejected "
        "by another one or not.",
        "Near 1: the sampler is far away, or the bound on the product of a long sequence's ratios is meant for "
        "single tokens.",
        "when measured",
    ),
    Metric(
        "correction/zero_sequence_fraction",
        "fraction",
        "lower",
        "Fraction of the sequences none of whose tokens has a weight above 0.",
        "High at level sequence and low at level geometric: length, not mismatch, decides.",
        "when measured",
    ),
    Metric(
        "correction/ess_token_fraction",
        "fraction",
        "higher",
        "Effective sample size (sum w)^2 / sum w^2 of the tokens' final weights, zeros among them, as a fraction of "
        "the tokens: 1 when all weigh the same.",
        "Low: a few tokens rule the gradient. Truncate earlier, or level geometric.",
        "when measured",
    ),
    Metric(
        "objective/kl_ref",
        "nats/token",
        "neutral",
        "Estimate of KL(policy || frozen initial policy) by objective.kl_estimator, times the ratio of new to old "
        "policy with objective.kl_unbiased. Only with objective.kl_coef > 0. With objective.kl_in: reward it is of "
        "the policy that the step began with.",
        "Runs away: kl_coef is too small for the learning rate.",
        "when measured",
    ),
    Metric(
        "objective/aux_loss",
        "loss",
        "neutral",
        "Load-balancing loss of the routers' own choice, before its weight, mean over the MoE layers: 1 when "
        "balanced. Only with train.router_aux_loss > 0.",
        "Rises: the routers drift to few experts. Raise train.router_aux_loss.",
        "when measured",
    ),
    Metric(
        "optim/grad_norm",
        "norm",
        "neutral",
        "Global gradient norm before clipping, mean over the updates of the step.",
        "Spikes: look at policy/extreme_fraction of the same step. 0: no group has a signal.",
    ),
    Metric(
        "optim/lr",
        "1",
        "neutral",
        "Learning rate of the last update.",
        "Not the scheduled one: the schedule was not resumed.",
    ),
    Metric(
        "optim/updates",
        "count",
        "neutral",
        "Optimizer updates since the start of the run.",
        "Stands still: every update is skipped.",
    ),
    Metric(
        "optim/skipped",
        "count",
        "must be 0",
        "Updates of this step skipped by all ranks because a loss or gradient was not finite on any.",
        "Repeated: numbers overflow. Lower the learning rate or train in float32. The run ends after "
        "guards.max_skipped_updates in a row.",
    ),
    # Where the time goes.
    Metric(
        "time/sample",
        "s",
        "lower",
        "Sampling the completions. 0 in a step that is trained on what was sampled before a restart.",
        "Most of the step: usual. Growing: completions grow.",
    ),
    Metric("time/reward", "s", "lower", "Verification.", "A large share: raise task.verifier_workers."),
    Metric(
        "time/routes",
        "s",
        "lower",
        "Reading and validating routes.",
        "A large share: the trace store is on a slow disk.",
    ),
    Metric(
        "time/placement",
        "s",
        "lower",
        "Counting the step's routes, planning and moving experts. Near 0 with placement.experts: natural.",
        "A large share: raise placement.every_steps.",
    ),
    Metric(
        "time/logprobs",
        "s",
        "lower",
        "Forward passes without a gradient: old, reference and native logprobs.",
        "Peaks every replay.native_every steps are the native pass.",
    ),
    Metric(
        "time/train",
        "s",
        "lower",
        "Forward, backward and optimizer.",
        "Growing at equal token counts: memory pressure.",
    ),
    Metric(
        "time/sync",
        "s",
        "lower",
        "Weights from the trainer into the sampler, with the digest check.",
        "Not well under time/train: the transport is too slow.",
    ),
    Metric(
        "time/sleep",
        "s",
        "lower",
        "The sampler giving its memory back, with rollout.sleep_level above 0. Waking up is part of time/sync.",
        "A large share of the step: a lower rollout.sleep_level moves less.",
        "when measured",
    ),
    Metric(
        "time/eval",
        "s",
        "lower",
        "Evaluation on the held-out prompts.",
        "Dominates: raise eval.every_steps.",
        "when measured",
    ),
    Metric(
        "time/checkpoint",
        "s",
        "lower",
        "Beginning a checkpoint after the step before (with checkpoint.asynchronous: false, writing all of it), and "
        "publishing it once it is written.",
        "Dominates: raise checkpoint.every_steps.",
        "when measured",
    ),
    Metric(
        "time/step",
        "s",
        "lower",
        "The whole step, wall time.",
        "Much more than its phases together: something is not timed.",
    ),
    Metric(
        "throughput/sampled_tokens_per_second",
        "tokens/s",
        "higher",
        "Completion tokens / time/sample.",
        "Falling: fewer sequences run at once, or completions grow uneven.",
    ),
    Metric(
        "throughput/trained_tokens_per_second",
        "tokens/s",
        "higher",
        "Prompt and completion tokens / time/train.",
        "Falling: packing got worse or experts are unbalanced.",
    ),
    Metric(
        "trace/bytes_per_token",
        "bytes/token",
        "lower",
        "Stored size of what was recorded for one forwarded token: its routes in all layers and, where asked for, "
        "its sampling support and router logits.",
        "Of routes alone above layers x top_k x bytes per id: the codec costs more than it saves.",
    ),
    Metric(
        "trace/bytes",
        "bytes",
        "lower",
        "Stored size of what this step recorded.",
        "Grows without longer completions: shards are padded.",
    ),
    # Does the sampler hold the trainer's weights?
    Metric(
        "sync/canary_abs_diff",
        "nats",
        "lower",
        "Mean |logprob difference| of a fixed prompt scored by both engines after the sync.",
        "A jump that stays: the sampler holds other weights than the trainer. The run ends above "
        "guards.max_canary_difference.",
    ),
    Metric(
        "sync/bytes", "bytes", "neutral", "Weights sent to the sampler.", "Changes between steps: tensors are missing."
    ),
    # Held-out prompts, on lines of their own.
    Metric(
        "eval/pass_rate",
        "fraction",
        "higher",
        "Pass rate on the held-out prompts, sampled at the training temperature.",
        "Falls while reward/pass_rate rises: overfitting or reward gaming.",
        "evaluation",
    ),
    Metric(
        "eval/pass_rate_greedy",
        "fraction",
        "higher",
        "Pass rate on the held-out prompts at temperature 0.",
        "Below eval/pass_rate: the most likely answer is wrong, luck is rewarded.",
        "evaluation",
    ),
    Metric(
        "eval/level/<name>",
        "fraction",
        "higher",
        "eval/pass_rate of the prompts of one difficulty level.",
        "An easy level falls while a hard one rises: forgetting.",
        "evaluation",
    ),
)
