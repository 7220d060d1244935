"""Lists every number that a run reports: its name, unit, direction, meaning, and the meaning of a bad value.

The order is that of docs/generated/metrics.md. `registry.py` holds runs to this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neutral", "must be 0", "must be 1", "must equal routing/expected"]
When = Literal["every step", "when measured", "evaluation"]

Mode = Literal["r3", "r2", "off"]

FAMILY = "<name>"
EVERY_STEP: When = "every step"
MEASURED: When = "when measured"
EVALUATION: When = "evaluation"
MODES: tuple[Mode, ...] = ("r3", "r2", "off")
R3, REPLAYED, NATIVE = MODES[:1], MODES[:2], MODES[1:]


@dataclass(frozen=True, slots=True)
class Metric:
    """Describes one reported number. A key ending in `<name>` stands for a family, with one member per name.

    Attributes:
        when: "every step": required in each training line. "when measured": may be absent. "evaluation": only in
            evaluation lines.
        modes: the values of replay.mode under which the metric exists. Other modes reject it.
    """

    key: str
    unit: str
    better: Better
    when: When
    modes: tuple[Mode, ...]
    meaning: str
    bad: str

    @property
    def family(self) -> bool:
        return self.key.endswith(FAMILY)


# fmt: off
ALL = (
    # Rewards of the policy.
    Metric("reward/mean", "reward", "higher", EVERY_STEP, MODES,
        "Mean weighted reward of the completions that were scored in this step.",
        "Flat while the pass rate is low: there is nothing to learn from (see group/zero_variance_fraction), or the "
        "learning rate is too low."),
    Metric("reward/quantile/<name>", "reward", "neutral", MEASURED, MODES,
        "Weighted reward below which 5, 25, 50, 75 and 95% of the scored completions lie (p05 to p95).",
        "p95 rises while p50 does not: only the prompts that were easy become better."),
    Metric("reward/pass_rate", "fraction", "higher", EVERY_STEP, MODES,
        "Fraction of the scored training completions whose task.pass_reward is 1, or of the episodes whose reward is "
        "at least task.environment.pass_threshold, at the sampling temperature.",
        "Rises while eval/pass_rate does not: the policy memorises the training prompts, or exploits the reward."),
    Metric("reward/failed_verdicts", "count", "must be 0", EVERY_STEP, MODES,
        "Verifications that raised an error, hung or died. Such a completion gets no reward and is left out of the "
        "statistics of its group.",
        "Above 0: the verifier is at fault, not the policy. Above task.max_failed_fraction the run ends."),
    Metric("reward/part/<name>", "reward", "higher", EVERY_STEP, MODES,
        "Mean of one reward function, before its weight.",
        "One part rises while the part that matters falls: the weights let the policy exploit one part."),
    Metric("reward/overlong_penalty", "reward", "higher", MEASURED, MODES,
        "Mean term that task.overlong adds to the reward of a sampled completion; it is 0 or below. reward/mean does "
        "not include it. Logged only with task.overlong.",
        "Far below 0: most completions come near rollout.max_completion_tokens."),
    Metric("reward/kl_penalty", "reward", "higher", MEASURED, MODES,
        "Mean term that the KL to the reference adds to the reward of a trained sequence: -objective.kl_coef x the sum "
        "of the KL over the completion. reward/mean does not include it. Logged only with objective.kl_in: reward.",
        "As large as the differences between rewards: the policy mainly learns to stay near the reference."),
    # Output of the sampler.
    Metric("rollout/sequences", "count", "neutral", EVERY_STEP, MODES,
        "Completions sampled in this step. The reward/ and rollout/ means are over all of them, trained on or not.",
        "Below prompts_per_step x group_size: completions were lost."),
    Metric("rollout/completion_tokens_mean", "tokens", "neutral", EVERY_STEP, MODES,
        "Mean length of a completion, including the stop token.",
        "Climbs steadily to max_completion_tokens while the reward does not: rambling. Falls to a few tokens: "
        "collapse."),
    Metric("rollout/completion_tokens_quantile/<name>", "tokens", "neutral", MEASURED, MODES,
        "Length below which 5, 25, 50, 75 and 95% of the completions lie (p05 to p95), including the stop token.",
        "p95 at max_completion_tokens: the longest completions are cut."),
    Metric("rollout/truncated_fraction", "fraction", "lower", EVERY_STEP, MODES,
        "Fraction of the completions that were cut at max_completion_tokens.",
        "High: the limit decides the reward, not the policy."),
    Metric("rollout/weight_version", "version", "neutral", EVERY_STEP, MODES,
        "Newest version of the weights that sampled completions of this step.",
        "Stays the same while optim/updates grows: the sync does not reach the sampler."),
    Metric("rollout/witnessed_rows", "count", "higher", EVERY_STEP, MODES,
        "Recorded rows of this step that passed the capture proof: their experts, as read back from the recording, are "
        "the top-k of the logits that the sampler's router computed.",
        "0: the recorder could not see the router logits. This is so with a compiled forward pass, pipeline stages, "
        "speculative decoding, and rollout.capture: native. See docs/internals/recording.md."),
    Metric("rollout/write_waits", "count", "lower", EVERY_STEP, MODES,
        "Engine steps of this step that waited because more than 1 GiB of recorded rows was still to be written to the "
        "trace.",
        "Above 0: the folder of the trace is too slow for the engines."),
    Metric("rollout/draft_acceptance", "fraction", "higher", MEASURED, MODES,
        "Fraction of the tokens proposed by the draft of speculative decoding that the model accepted. A request's "
        "last proposals do not count. Logged only with rollout.vllm.speculative_config.",
        "Falls as the run goes on: updates do not reach the draft, which proposes what older weights would say."),
    Metric("rollout/lost_servers", "servers", "lower", MEASURED, MODES,
        "Servers of rollout.servers that are lost at present. One that was started again is used from the next weight "
        "sync on.",
        "Above 0: the other servers sample more; stderr, or pool.log, says why. Above rollout.max_lost_servers the run "
        "ends."),
    Metric("group/zero_variance", "count", "lower", EVERY_STEP, MODES,
        "Sampled prompt groups in which all completions earned the same reward. A loss that compares the rewards of a "
        "group learns nothing from such a group. With objective.kl_in: reward, the trained groups whose rewards are "
        "equal less the KL.",
        "Near the number of groups: the prompts are too easy or too hard."),
    Metric("group/zero_variance_fraction", "fraction", "lower", EVERY_STEP, MODES,
        "group/zero_variance / the number of these groups.",
        "Near 1: no gradient is left. The value rises by itself as the task is solved."),
    Metric("group/sampled", "count", "lower", MEASURED, MODES,
        "Prompt groups sampled in this step, in all rounds. Logged only with rollout.dynamic_sampling_rounds > 1.",
        "Always prompts_per_step x dynamic_sampling_rounds: every round was needed. See group/lacking."),
    Metric("group/discarded", "count", "lower", MEASURED, MODES,
        "Sampled groups that were not trained on, because all their rewards are equal or because there were more "
        "groups than needed. Logged only with rollout.dynamic_sampling_rounds > 1.",
        "Most of the sampled groups: choose prompts of another difficulty."),
    Metric("group/lacking", "count", "must be 0", MEASURED, MODES,
        "Number of groups with differing rewards that were still missing when the sampling rounds ran out. The step "
        "trains on fewer groups. If it found none, it trains on groups of equal rewards, as without dynamic sampling. "
        "Logged only with rollout.dynamic_sampling_rounds > 1.",
        "Above 0: the prompts are too easy or too hard, or there are too few rounds."),
    # The pool of an asynchronous run. Ages are in weight versions.
    Metric("pipeline/staleness", "versions", "lower", MEASURED, MODES,
        "Mean of (version of the step's weights - version with which the group began), over the groups that the step "
        "trains on. It is the sum of the next two.",
        "Near the bound: samplers run far ahead, and a lower bound costs little."),
    Metric("pipeline/staleness_in_flight", "versions", "lower", MEASURED, MODES,
        "Part of pipeline/staleness that passed while the groups were sampled and judged.",
        "Much of it: completions take longer than steps."),
    Metric("pipeline/staleness_queued", "versions", "lower", MEASURED, MODES,
        "Part of pipeline/staleness that passed while judged groups waited for a step.",
        "Much of it: the trainer is the slower side. Fewer samplers, or a lower bound, would do."),
    Metric("pipeline/staleness_max", "versions", "lower", MEASURED, MODES,
        "Largest age of a group that the step trains on.",
        "At the bound in most steps: the oldest groups are taken just in time, and steps may wait for them."),
    Metric("pipeline/versions_mean", "versions", "lower", MEASURED, MODES,
        "Mean number of weight versions that sampled one completion.",
        "High: new weights come often while completions are long."),
    Metric("pipeline/versions_max", "versions", "lower", MEASURED, MODES,
        "Largest number of weight versions that sampled one completion.",
        "Far above pipeline/versions_mean: few very long completions."),
    Metric("pipeline/kv_age", "versions", "lower", MEASURED, MODES,
        "Mean of (version that sampled the token - oldest version whose KV it attends to), over the sampled tokens. 0 "
        "where KV is computed again with new weights.",
        "Grows together with policy_kl/k3: KV of older weights harms."),
    Metric("pipeline/prefilled_again", "fraction", "lower", MEASURED, MODES,
        "Fraction of the forwarded tokens that were forwarded before, because a new request continued an unfinished "
        "completion.",
        "High: continued completions cost more than they save."),
    Metric("pipeline/queued", "groups", "neutral", MEASURED, MODES,
        "Judged groups that are left in the pool when the step has taken its own.",
        "Always 0: the samplers are the slower side."),
    Metric("pipeline/sampler_idle_fraction", "fraction", "lower", MEASURED, MODES,
        "Fraction of all servers' request slots that were idle, over the time since the last step. During a weight "
        "update all count as idle.",
        "High with pipeline/queued above 0: the trainer is the slower side. High with pipeline/queued at 0: verifiers "
        "or the longest completions hold the groups up."),
    Metric("pipeline/dropped/<name>", "groups", "lower", MEASURED, MODES,
        "Groups that ended without training since the last step, by reason. failed: no verdict. uninformative: equal "
        "rewards, under dynamic sampling. surplus: a step did not need them. stale: they missed their last step.",
        "Many stale ones: let steps wait for them, or raise the bound."),
    Metric("pipeline/wasted_tokens/<name>", "tokens", "lower", MEASURED, MODES,
        "Tokens sampled since the last step that no step trains on, by the reason of pipeline/dropped. cut: pieces of "
        "aborted completions that are sampled again: with rollout.stop, or because a microbatch has no room for more. "
        "lost: what a server was sampling when it was lost, with the routes in its memory.",
        "A large share of all sampled tokens."),
    # Episodes of an environment.
    Metric("episode/turns_mean", "turns", "neutral", MEASURED, MODES,
        "Mean number of turns of an episode. Each completion that the agent received is a turn.",
        "Falls to 1 where tools should be used: the model answers without them."),
    Metric("episode/turns_quantile/<name>", "turns", "neutral", MEASURED, MODES,
        "Number of turns below which 5, 25, 50, 75 and 95% of the episodes lie (p05 to p95).",
        "p95 at task.environment.turns: the limit ends episodes."),
    Metric("episode/undelivered", "turns", "lower", MEASURED, MODES,
        "Sampled turns that no agent received, because the client went away. They are not trained on, and count in no "
        "limit or reward.",
        "Above 0: clients give up too early. A time limit lets only short completions through, which are then learnt; "
        "raise it, or bound completions by max_tokens."),
    Metric("episode/other_system", "turns", "lower", MEASURED, MODES,
        "Turns that fail to continue an earlier one only because the system prompt differs. Each is a branch from the "
        "root.",
        "Above 0: something in the system prompt changes with each request, such as the time. Leave it out: every turn "
        "computes its whole history again, in sampling and in training."),
    Metric("episode/branches_mean", "branches", "neutral", MEASURED, MODES,
        "Mean number of branches of an episode: histories that no turn continues.",
        "Far above 1 in a dialogue without parallel requests: something rewrites the history, such as a chat template "
        "that drops earlier thinking. Every branch computes its history again in training."),
    Metric("episode/sequences_mean", "sequences", "neutral", MEASURED, MODES,
        "Mean number of training sequences per episode. It is the number of branches if the weights did not change "
        "within the episode.",
        "Far above episode/branches_mean: weights change often while episodes are played."),
    Metric("episode/inserted_fraction", "fraction", "neutral", MEASURED, MODES,
        "Fraction of the tokens after the first sampled one that were given to the model between its turns, such as "
        "the results of tools. They are forwarded with their recorded routes, and are not in the loss.",
        "Near 1: training computes mostly tokens that the model did not sample."),
    Metric("episode/failed", "episodes", "must be 0", MEASURED, MODES,
        "Episodes without a reward, because the environment raised, hung, crashed or returned none. They are not "
        "trained on, and failed_episodes.log of the run folder has their tracebacks.",
        "Above 0: fix the environment. Above task.max_failed_fraction the run ends."),
    # Agreement of sampler and trainer on the policy: same tokens, same weights, two engines.
    Metric("policy_kl/k1", "nats/token", "neutral", EVERY_STEP, MODES,
        "Mean over the sampled tokens of (sampler logprob - trainer logprob): the k1 estimate of KL(rollout || "
        "trainer). The trainer routes as it does in training: under replay when replay.mode is r3.",
        "Far from 0, or of the same sign at every step: a systematic difference (temperature, dtype, wrong weights)."),
    Metric("policy_kl/k3", "nats/token", "lower", EVERY_STEP, MODES,
        "Mean over the sampled tokens of (r - 1 - log r), where r = trainer probability / sampler probability: the k3 "
        "estimate of KL(rollout || trainer). The trainer routes as it does in training. If objective.old_logprobs is "
        "not trainer, only the sequences of the step's first update count, here and in all metrics of this comparison.",
        "Grows over the run: an early sign of collapse, because the importance ratio is turning into noise."),
    Metric("policy_kl/k3_lag/<name>", "nats/token", "lower", MEASURED, MODES,
        "policy_kl/k3 of the tokens that were sampled this many weight versions before the trainer's: 0, 1, 2-3, 4-7 "
        "or 8+. With pipeline.kv: keep, a token has the largest lag of its sequence so far. Logged only for lags that "
        "occur, and not in a synchronous run whose tokens and rows all have lag 0.",
        "Lag 0 above policy_kl/k3 of a synchronous run: a fault between the engines, not staleness. Grows steeply with "
        "the lag: the policy moves too fast for samples this old."),
    Metric("policy_kl/tokens_lag/<name>", "tokens", "neutral", MEASURED, MODES,
        "Tokens of each lag that policy_kl/k3_lag is a mean over.",
        "Few of lag 0: guards.same_version needs more steps to notice a fault."),
    Metric("policy/extreme_fraction", "fraction", "lower", EVERY_STEP, MODES,
        "Fraction of the sampled tokens whose probability differs between the engines by more than a factor of 2: "
        "F(2).",
        "Above 1e-3: a few tokens dominate the gradient. Above 0.1: collapse is near."),
    Metric("policy/extreme_fraction_5", "fraction", "lower", EVERY_STEP, MODES,
        "Fraction of the sampled tokens whose probability differs between the engines by more than a factor of 5: "
        "F(5).",
        "Above 0: look at policy/logratio_abs_max."),
    Metric("policy/logratio_abs_p50", "nats", "lower", EVERY_STEP, MODES,
        "Median of |trainer logprob - sampler logprob| over the sampled tokens. It is at most 2.4% too high; values up "
        "to 1e-7 count as 0.",
        "Grows while policy/logratio_abs_p99 stays the same: all tokens differ a little. Precision has this effect."),
    Metric("policy/logratio_abs_p99", "nats", "lower", EVERY_STEP, MODES,
        "99th percentile of |trainer logprob - sampler logprob| over the sampled tokens.",
        "Grows while the median stays the same: some tokens differ a lot. Wrong routes have this effect."),
    Metric("policy/logratio_abs_max", "nats", "lower", EVERY_STEP, MODES,
        "Largest |trainer logprob - sampler logprob| of any sampled token.",
        "Several nats on one token: one position is entirely different. Look for a wrong route or a shifted token."),
    Metric("policy/perplexity_train", "perplexity", "neutral", EVERY_STEP, MODES,
        "Mean over the sequences of exp(-mean trainer logprob of the sampled tokens).",
        "Rises while policy/perplexity_rollout does not: the trainer finds the sampled tokens unlikely."),
    Metric("policy/perplexity_rollout", "perplexity", "neutral", EVERY_STEP, MODES,
        "Mean over the sequences of exp(-mean sampler logprob of the sampled tokens).",
        "Near 1: the policy has become deterministic and has nothing left to explore."),
    Metric("policy/log_perplexity_diff", "nats/token", "neutral", EVERY_STEP, MODES,
        "Mean over the sequences of (mean sampler logprob - mean trainer logprob). It is policy_kl/k1 with equal "
        "weight for every sequence, however long.",
        "Its sign differs from that of policy_kl/k1: long sequences differ in another direction than short ones."),
    Metric("policy/log_perplexity_abs_diff", "nats/token", "lower", EVERY_STEP, MODES,
        "Mean over the sequences of |mean sampler logprob - mean trainer logprob|.",
        "Much above |policy/log_perplexity_diff|: single sequences are off in both directions. As large as a GSPO clip "
        "range: clipping removes mismatch instead of large updates."),
    Metric("policy/chi2_token", "chi2", "lower", EVERY_STEP, MODES,
        "Mean over the tokens of (trainer probability / sampler probability)^2, minus 1: the chi-square distance of "
        "the trainer from the sampler, token by token.",
        "Above 0.1: importance weights of tokens begin to vary too much."),
    Metric("policy/chi2_sequence_product", "chi2", "lower", EVERY_STEP, MODES,
        "Mean over the sequences of p^2, minus 1, where p is the product of the token ratios (trainer probability / "
        "sampler probability): the chi-square distance of whole sequences.",
        "Explodes with length even where each token is fine: importance weights of whole sequences cannot be used."),
    Metric("policy/chi2_sequence_geometric", "chi2", "lower", EVERY_STEP, MODES,
        "Mean over the sequences of g^2, minus 1, where g is the geometric mean of the token ratios. GSPO clips this "
        "ratio. It is another number than policy/chi2_sequence_product, though both are called sequence-level "
        "elsewhere.",
        "Above 0.1: whole sequences drift, not single tokens."),
    Metric("policy/effective_sample_fraction", "fraction", "higher", EVERY_STEP, MODES,
        "(sum of w)^2 / (tokens x sum of w^2), where w is the ratio trainer probability / sampler probability of a "
        "token, not truncated. An importance-weighted mean is as precise as a plain mean over this fraction of the "
        "tokens.",
        "Below 0.9: a few tokens dominate the mean."),
    Metric("policy/entropy", "nats/token", "neutral", EVERY_STEP, MODES,
        "Mean entropy of the trainer's distribution at each completion token. It is taken before the first update of "
        "the step, at the sampling temperature, over the tokens that rollout.keep_sampling_mask leaves. With "
        "objective.old_logprobs: sampler it covers only the sequences of the first update.",
        "Falls to 0 while rewards still rise: exploration has ended. Rises without limit: objective.entropy_coef is "
        "too large."),
    Metric("policy_kl/k1_native", "nats/token", "neutral", MEASURED, MODES,
        "policy_kl/k1 when the trainer routes natively, on the same tokens, weights and sampler logprobs.",
        "See policy_kl/k1."),
    Metric("policy_kl/k3_native", "nats/token", "lower", MEASURED, MODES,
        "policy_kl/k3 when the trainer routes natively, on the same tokens, weights and sampler logprobs. Compare it "
        "only with policy_kl/k3 of the same step.",
        "Not above policy_kl/k3: replay removes nothing here. Then the engines differ by precision or kernels, not by "
        "routes."),
    Metric("policy/extreme_fraction_native", "fraction", "lower", MEASURED, MODES,
        "policy/extreme_fraction when the trainer routes natively.",
        "See policy/extreme_fraction."),
    # Agreement of sampler and trainer on the routes.
    Metric("routing/shadow_mismatch", "fraction", "lower", EVERY_STEP, R3,
        "Fraction of the (token, MoE layer) positions where the trainer, inside the replayed forward, would choose "
        "another set of experts than the recorded one. It shows the disagreement of each router alone, because replay "
        "removes the effect of earlier layers.",
        "As high as routing/native_mismatch: the routers themselves disagree. Look at dtype, gate weights and sync."),
    Metric("routing/shadow_overlap", "fraction", "higher", EVERY_STEP, R3,
        "Fraction of the recorded experts that the trainer would also choose inside the replayed forward. Mean over "
        "the (token, MoE layer) positions.",
        "Far below 1 - routing/shadow_mismatch / top-k: sets that differ do so in several experts."),
    Metric("routing/shadow_margin", "score", "lower", EVERY_STEP, R3,
        "How far the lowest recorded expert scores below the lowest expert that the trainer would choose, inside the "
        "replayed forward. Mean over the (token, MoE layer) positions; 0 where the sets agree. The score is what the "
        "router ranks by: logits in nats under softmax, biased scores under sigmoid.",
        "Grows: engines disagree on clear choices, not only on near ties at the edge of the top-k."),
    Metric("routing/shadow_mismatch_layer/<name>", "fraction", "lower", MEASURED, R3,
        "routing/shadow_mismatch of one MoE layer. The name is the layer's global number.",
        "One layer far above its neighbours: its gate's weights or precision differ between the engines."),
    Metric("routing/alignment_power", "fraction", "higher", MEASURED, R3,
        "How much this step's alignment test could see: the mean, over its core claims and the ranks, of the share of "
        "planted faults that it would have refused. The test compares the recorded routes with the scores of the "
        "trainer's routers before the first update under them (guards.alignment). Core claims are those about rows of "
        "another layer, token, prompt or completion, or of nothing. If a step has several tests, the weakest counts.",
        "Low: few tokens per rank, short sequences, or routers that choose alike for all tokens. Only the checksums "
        "would detect such faults."),
    Metric("routing/alignment_evidence", "nats", "lower", MEASURED, R3,
        "Largest evidence against a claim of the alignment test, on any rank, minus the evidence that refuses it; "
        "-1000 where nothing was tested.",
        "Rises towards 0: the engines disagree more and more. At 0 the run ends."),
    Metric("routing/alignment_moved", "weight", "neutral", MEASURED, R3,
        "Learning rate x updates since the oldest row was sampled: about the largest distance of a weight from its "
        "value then.",
        "Above 0.005: routes of older weights may be unrelated to their rows. Then the claims prompts, completions, "
        "no_rows, pieces, single_ids and some_rows are weak."),
    Metric("routing/proven/<name>", "fraction", "higher", MEASURED, R3,
        "Fraction of the ranks on which the alignment test has proven this claim: it would have refused 95% of the "
        "faults that it planted into this step. docs/internals/alignment.md lists the claims.",
        "Falls: the claim is weak, and its fault would pass. Equal rows, short completions and older weights do that."),
    Metric("routing/native_mismatch", "fraction", "lower", MEASURED, MODES,
        "Fraction of the (token, MoE layer) positions where a forward that routes natively chooses another set of "
        "experts than the recorded one. It includes the disagreement of each router and its effect on later layers.",
        "A few percent to 0.1 is usual for bf16 engines. Near 1: the weights differ, or the trace is shifted."),
    Metric("routing/native_token_mismatch", "fraction", "lower", MEASURED, MODES,
        "Fraction of the tokens whose set differs in at least one MoE layer, in a forward that routes natively.",
        "Grows with the number of layers: in deep models it is near 1 even when routing/native_mismatch is small."),
    Metric("routing/native_overlap", "fraction", "higher", MEASURED, MODES,
        "routing/shadow_overlap in a forward that routes natively.",
        "See routing/shadow_overlap."),
    Metric("routing/native_margin", "score", "lower", MEASURED, MODES,
        "routing/shadow_margin in a forward that routes natively.",
        "See routing/shadow_margin."),
    Metric("routing/native_mismatch_layer/<name>", "fraction", "lower", MEASURED, NATIVE,
        "routing/native_mismatch of one MoE layer. The name is the layer's global number.",
        "One layer far above its neighbours: its gate's weights or precision differ between the engines."),
    Metric("routing/shadow_mismatch_lag/<name>", "fraction", "lower", MEASURED, R3,
        "routing/shadow_mismatch of the rows that were routed this many weight versions before the trainer's: 0, 1, "
        "2-3, 4-7 or 8+. Logged only for lags that occur, and not where all tokens and rows are of lag 0.",
        "Lag 0 above routing/shadow_mismatch of a synchronous run: a fault, not staleness."),
    Metric("routing/native_mismatch_lag/<name>", "fraction", "lower", MEASURED, NATIVE,
        "routing/native_mismatch of the rows that were routed this many weight versions before the trainer's.",
        "See routing/shadow_mismatch_lag/<name>."),
    Metric("routing/applied_mismatch", "count", "must be 0", EVERY_STEP, REPLAYED,
        "Number of (sequence, MoE layer) pairs with a row that went to other experts than recorded. A checksum over "
        "request, position, token, layer and experts finds them. This is an integrity check: 0 says that replay was "
        "applied, not that it helped.",
        "Above 0: replay is broken, and the run ends."),
    Metric("routing/coverage", "fraction", "must be 1", EVERY_STEP, REPLAYED,
        "Fraction of the (trained token, MoE layer) positions with a recorded route that may be replayed.",
        "Below 1: some positions are routed natively, as replay.missing and replay.stale allow."),
    Metric("routing/fallback_positions", "count", "must be 0", EVERY_STEP, REPLAYED,
        "(trained token, MoE layer) positions that are routed natively because their routes are missing or stale. "
        "Above replay.max_fallback_fraction the run ends.",
        "Above 0: the sampler did not record everything. See engine.log."),
    Metric("routing/dropped_sequences", "count", "must be 0", EVERY_STEP, REPLAYED,
        "Sequences that are not trained on because routes are missing (replay.missing: drop). Above "
        "replay.max_fallback_fraction the run ends.",
        "Above 0: the sampler did not record everything. See engine.log."),
    Metric("routing/stale_tokens", "count", "neutral", EVERY_STEP, REPLAYED,
        "Trained tokens whose routes were chosen by older weights (replay.stale).",
        "Most of the tokens: the sampler lags behind."),
    Metric("routing/load_excess", "fraction", "lower", EVERY_STEP, REPLAYED,
        "Pairs of the fullest expert-parallel rank / the mean over these ranks, minus 1. A pair is a (token, expert) "
        "choice. Pairs are summed over microbatches and layers and follow the sampler's routes (under r2 the trainer's "
        "own routes differ a little).",
        "High: every layer waits for the fullest rank. Try train.packing: load. It cannot even out experts that are "
        "popular in the whole batch."),
    Metric("routing/packed_by_length", "count", "neutral", EVERY_STEP, REPLAYED,
        "Updates of the step whose microbatches were packed by length. Under train.packing: load these are the updates "
        "for which no more even packing was found; otherwise they are all updates.",
        "Not 0 under train.packing: load: the same experts are popular in all sequences, or there is only one round of "
        "microbatches. Placement can help then, packing cannot."),
    Metric("routing/consumed", "count", "must equal routing/expected", EVERY_STEP, REPLAYED,
        "Number of times that recorded routes were applied in this step, from the replay ledger: once per (microbatch, "
        "layer) in each pass.",
        "Fewer than expected: a layer was skipped. More: one was replayed twice."),
    Metric("routing/expected", "count", "neutral", EVERY_STEP, REPLAYED,
        "Number of times that recorded routes had to be applied in this step: for every (microbatch, layer) once "
        "forward and once per recomputation.",
        "Differs between steps of equal shape: the plan changed."),
    Metric("routing/planned_fraction", "fraction", "higher", EVERY_STEP, REPLAYED,
        "Fraction of the dispatches under replay, recomputations included, that followed a plan computed from the "
        "routes in advance. A dispatch is one (microbatch, MoE layer). A planned dispatch exchanges no counts and does "
        "not make the host wait.",
        "Below 1 with replay.plan: a microbatch of some rank has rows without a route (replay.missing, replay.stale)."),
    Metric("routing/peak_rows", "count", "neutral", EVERY_STEP, REPLAYED,
        "Largest number of rows that the experts of any rank get in one layer of one microbatch. A row is a (token, "
        "expert) pair; padding counts. The dispatch plans give it before the first pass. It is 0 without plans.",
        "High: activations need much memory. replay.max_rows limits it. --plan --trace shows it for recorded batches, "
        "beside the worst case."),
    # Placement of experts.
    Metric("placement/excess_before", "fraction", "lower", MEASURED, MODES,
        "routing/load_excess before the new placement of experts. It is computed from the routes that the plan used, "
        "summed over steps and layers. Logged only with placement.experts: traced, in steps with a plan.",
        "As high as before the last plan: popularity changes faster than placement.every_steps."),
    Metric("placement/excess_after", "fraction", "lower", MEASURED, MODES,
        "placement/excess_before for the planned placement. routing/load_excess would have this value if every "
        "microbatch had the mean popularity of experts.",
        "Not below placement/excess_before: no move gained enough, or a single expert has more than a rank's share."),
    Metric("placement/excess_copied", "fraction", "lower", MEASURED, MODES,
        "routing/load_excess with the copies of experts that the dispatch plans make. Padding counts. Logged only with "
        "placement.copies.",
        "Not below routing/load_excess: raise placement.copies, or lower placement.least_copied_rows. Ranks in several "
        "nodes also use copies to keep rows within a node."),
    Metric("placement/experts_moved", "count", "neutral", MEASURED, MODES,
        "Number of experts, over all layers, that the plan moved to another rank.",
        "Many in every plan for a small gain: raise placement.min_gain or lower placement.max_moved."),
    # The update.
    Metric("objective/loss", "loss", "neutral", EVERY_STEP, MODES,
        "Value of the loss. It does not measure progress. With centred advantages and a mean over sequences it is near "
        "0 by construction. Under cispo, dppo_tv, minirl and topr it contains the log-likelihood, and only its "
        "gradient has a meaning.",
        "Not finite: all ranks skip the update."),
    Metric("objective/clip_fraction", "fraction", "neutral", EVERY_STEP, MODES,
        "Fraction of the tokens (gspo: of the sequences) whose gradient the loss removed or reduced. Clipping the "
        "ratio removes the gradient (gspo, gspo_token, grpo, dr_grpo, dapo, gmpo, decoupled), and so does masking "
        "(dppo_tv, minirl). cispo and topr truncate the weight. sapo fades it, and a gate below 1/2 counts. A token "
        "with advantage 0 or correction weight 0 does not count.",
        "Near 1: the policy moves too far in a step. 0 is expected with one update per step and old_logprobs=trainer."),
    Metric("objective/ratio_mean", "ratio", "neutral", EVERY_STEP, MODES,
        "Mean ratio of new policy to old policy (objective.old_logprobs), over the tokens or sequences that "
        "objective/clip_fraction counts, before clipping, masking or fading. gspo uses the ratio of the sequence. "
        "gspo_token uses the ratio of the token's sequence. Other losses use the ratio of the token, without the "
        "weight to the sampler that minirl and decoupled also use.",
        "Far from 1: the old logprobs do not belong to these tokens or weights."),
    Metric("objective/zero_advantage_fraction", "fraction", "lower", EVERY_STEP, MODES,
        "Fraction of the trained sequences whose advantage is exactly 0. They teach nothing.",
        "Near 1: rewards do not differ where objective.advantage compares them."),
    Metric("objective/head_mass", "fraction", "higher", MEASURED, MODES,
        "Mean probability that the sampler gave to its objective.score_centering likeliest tokens, over the tokens. "
        "Score centering is exact on them and models the rest. Logged only with objective.score_centering.",
        "Below 0.99: much of the sampler is modelled. Raise objective.score_centering."),
    Metric("objective/second_moment", "nats^2", "lower", MEASURED, MODES,
        "Mean of (log r)^2 over the tokens of an update that the loss pushes further away from the sampler, where r = "
        "old policy / sampler, before any of them is masked. Mean over the updates of the step. Logged only with "
        "objective.second_moment_limit, to which it is compared.",
        "Above the limit: tokens are masked, correction/zero_token_fraction says how many."),
    Metric("correction/weight_mean", "ratio", "neutral", MEASURED, MODES,
        "Mean weight that objective.corrections, objective.off_policy_delta and objective.second_moment_limit give a "
        "token, zeros included, over the updates of the step. All correction/ metrics are logged only where one of the "
        "three is set.",
        "Far from 1: the mismatch scales the loss. Look at policy_kl/k3."),
    Metric("correction/zero_token_fraction", "fraction", "lower", MEASURED, MODES,
        "Fraction of the tokens with weight 0, because they or their sequence were rejected, masked or vetoed. They "
        "still count in the denominator.",
        "Above a few percent: the bounds are narrower than the mismatch, and much of what was sampled is lost."),
    Metric("correction/truncated_token_fraction", "fraction", "lower", MEASURED, MODES,
        "Fraction of the tokens whose ratio, or whose sequence's ratio, was lowered by a truncate rule. Tokens that "
        "another rule rejected count too.",
        "Near 1: the sampler is far away, or a bound meant for single tokens is applied to the product of a long "
        "sequence's ratios."),
    Metric("correction/zero_sequence_fraction", "fraction", "lower", MEASURED, MODES,
        "Fraction of the sequences in which every token has weight 0.",
        "High at level sequence and low at level geometric: the length causes it, not the mismatch."),
    Metric("correction/ess_token_fraction", "fraction", "higher", MEASURED, MODES,
        "Effective sample size of the tokens' final weights, (sum of w)^2 / (sum of w^2), zeros included, as a "
        "fraction of the tokens. It is 1 when all weights are equal.",
        "Low: a few tokens dominate the gradient. Lower the bound of truncation, or use level geometric."),
    Metric("objective/kl_ref", "nats/token", "neutral", MEASURED, MODES,
        "Estimate of KL(policy || frozen initial policy) by objective.kl_estimator. With objective.kl_unbiased it is "
        "multiplied by the ratio of new to old policy. With objective.kl_in: reward it is that of the policy at the "
        "beginning of the step. Logged only with objective.kl_coef > 0.",
        "Grows without limit: kl_coef is too small for the learning rate."),
    Metric("objective/aux_loss", "loss", "neutral", MEASURED, MODES,
        "Load-balancing loss of the experts that the routers themselves choose, before its weight. Mean over the MoE "
        "layers; 1 when balanced. Logged only with train.router_aux_loss > 0.",
        "Rises: the routers drift to few experts. Raise train.router_aux_loss."),
    Metric("optim/grad_norm", "norm", "neutral", EVERY_STEP, MODES,
        "Global gradient norm before clipping. Mean over the updates of the step.",
        "Spikes: look at policy/extreme_fraction of the same step. 0: no group has a signal."),
    Metric("optim/lr", "1", "neutral", EVERY_STEP, MODES,
        "Learning rate of the last update.",
        "Not the scheduled rate: the schedule was not resumed."),
    Metric("optim/updates", "count", "neutral", EVERY_STEP, MODES,
        "Optimizer updates since the start of the run.",
        "Stays the same: every update is skipped."),
    Metric("optim/skipped", "count", "must be 0", EVERY_STEP, MODES,
        "Updates of this step that all ranks skipped because a loss or gradient was not finite on one of them.",
        "Above 0 again and again: numbers overflow. Lower the learning rate or train in float32. After "
        "guards.max_skipped_updates in a row the run ends."),
    # Time and throughput.
    Metric("time/sample", "s", "lower", MEASURED, MODES,
        "Time to sample the completions. 0 in a step that trains on completions sampled before a restart.",
        "Most of the step is usual. Growing: completions become longer."),
    Metric("time/reward", "s", "lower", MEASURED, MODES,
        "Time that a step waits for verdicts after its last completion. Completions are judged as they end.",
        "A large share: raise task.verifier_workers."),
    Metric("time/wait", "s", "lower", MEASURED, MODES,
        "Time that the ranks waited for completions that are sampled while they train (pipeline.mode).",
        "A large share: the sampler is slower than the trainer. Give it more engines, see moe-rl plan."),
    Metric("time/routes", "s", "lower", EVERY_STEP, MODES,
        "Time to read and validate routes.",
        "A large share: the trace store is on a slow disk."),
    Metric("time/placement", "s", "lower", EVERY_STEP, MODES,
        "Time to count the routes of the step, plan a placement and move experts. Near 0 with placement.experts: "
        "natural.",
        "A large share: raise placement.every_steps."),
    Metric("time/logprobs", "s", "lower", EVERY_STEP, MODES,
        "Time of forward passes without a gradient: old, reference and native logprobs.",
        "Peaks every replay.native_every steps: that is the native pass."),
    Metric("time/train", "s", "lower", EVERY_STEP, MODES,
        "Time of forward, backward and optimizer.",
        "Grows at equal token counts: memory is short."),
    Metric("time/sync", "s", "lower", EVERY_STEP, MODES,
        "Time to send the trainer's weights to the sampler and check their digest.",
        "Not well below time/train: the transport is too slow."),
    Metric("time/sleep", "s", "lower", MEASURED, MODES,
        "Time in which the sampler gives its memory back, with rollout.sleep_level above 0. Waking up is part of "
        "time/sync.",
        "A large share of the step: a lower rollout.sleep_level moves less."),
    Metric("time/eval", "s", "lower", MEASURED, MODES,
        "Time to evaluate on the held-out prompts.",
        "Most of the step: raise eval.every_steps."),
    Metric("time/checkpoint", "s", "lower", MEASURED, MODES,
        "Time to publish the checkpoint that was written in the background, and to start the next one. With "
        "checkpoint.asynchronous: false it includes the whole write.",
        "Most of the step: raise checkpoint.every_steps."),
    Metric("time/export", "s", "lower", MEASURED, MODES,
        "Time to publish the weights that were exported in the background, and to gather and copy the next ones.",
        "Most of the step: raise export.every_steps."),
    Metric("time/step", "s", "lower", EVERY_STEP, MODES,
        "Wall time of the whole step.",
        "Much more than the sum of its phases: some part of the step is not timed."),
    Metric("throughput/sampled_tokens_per_second", "tokens/s", "higher", EVERY_STEP, MODES,
        "Completion tokens / time/sample.",
        "Falls: fewer sequences run at once, or completion lengths vary more."),
    Metric("throughput/trained_tokens_per_second", "tokens/s", "higher", EVERY_STEP, MODES,
        "Prompt and completion tokens / time/train.",
        "Falls: packing got worse, or experts are unbalanced."),
    Metric("throughput/mfu", "fraction", "higher", MEASURED, MODES,
        "Model FLOPs utilization of time/train: the operations of a forward and a backward pass over the trained "
        "tokens, with the experts that each token uses and without recomputation, over what all ranks could do at the "
        "peak of their device. With train.lora, no gradients of frozen weights count. Not measured where that peak is "
        "not known: on CPUs, and with train.dtype=float32.",
        "Far below that of a dense model of the active size: small microbatches, or experts wait for each other."),
    Metric("memory/host_peak_bytes", "bytes", "lower", MEASURED, MODES,
        "Largest resident memory of a training rank since its start, on the rank that had most.",
        "Rises from step to step: something is kept that should be freed."),
    Metric("memory/device_peak_bytes", "bytes", "lower", MEASURED, MODES,
        "Largest GPU memory that PyTorch has reserved on a training rank since its start, on the rank that had most. "
        "Logged only with a GPU.",
        "Near the memory of the GPU: lower train.microbatch_tokens or set train.recompute."),
    Metric("trace/bytes_per_token", "bytes/token", "lower", EVERY_STEP, MODES,
        "trace/bytes / tokens of the sequences: routes in all layers and, where configured, sampling support and "
        "router logits. A prompt that sequences share is stored once and counts in each.",
        "Above layers x top_k x bytes per id when only routes are stored: the codec costs more than it saves."),
    Metric("trace/bytes", "bytes", "lower", EVERY_STEP, MODES,
        "Stored bytes of everything that this step recorded.",
        "Grows while completions do not get longer: shards are padded."),
    # Agreement of the sampler's weights with the trainer's.
    Metric("sync/canary_abs_diff", "nats", "lower", MEASURED, MODES,
        "Mean |logprob difference| of the canary, for the sampler with the largest one. The canary is about 256 fixed "
        "tokens that both engines score after the sync with native routing.",
        "Jumps and stays high: the sampler holds other weights than the trainer. The run ends above "
        "guards.max_canary_difference, or far above all earlier values of the run."),
    Metric("sync/canary_mismatch", "fraction", "lower", MEASURED, MODES,
        "Fraction of the canary's (token, MoE layer) positions where sampler and trainer choose other sets of experts.",
        "Jumps: the sampler's routers differ from the trainer's. The run ends if a layer agrees better with another "
        "layer, or if two experts take each other's tokens."),
    Metric("sync/canary_change", "nats", "neutral", MEASURED, MODES,
        "Mean |change| of the sampler's log-probabilities of the canary since the version before. With several "
        "samplers it is that of the one that changed least.",
        "Far below sync/canary_change_trainer: the update has not reached a sampler. The run ends."),
    Metric("sync/canary_change_trainer", "nats", "neutral", MEASURED, MODES,
        "The same of the trainer's log-probabilities.",
        "0: no weight changed."),
    Metric("sync/canary_power", "fraction", "higher", MEASURED, MODES,
        "Fraction of the MoE layers in which the canary could have detected wrong routes of the sampler. A layer "
        "counts if its routes agree clearly better than those of every fault that was tried.",
        "Below 1: the canary is too short (see rollout.max_prompt_tokens), or a router chooses alike for all tokens."),
    Metric("sync/canary_recorded", "fraction", "higher", MEASURED, MODES,
        "Fraction of the samplers that recorded the routes of the canary.",
        "Below 1: only log-probabilities are compared for the other samplers."),
    Metric("sync/bytes", "bytes", "neutral", MEASURED, MODES,
        "Bytes of weights sent to the sampler.",
        "Changes between steps: tensors are missing."),
    # Evaluation lines.
    Metric("eval/pass_rate", "fraction", "higher", EVALUATION, MODES,
        "Pass rate on the held-out prompts, sampled as each source of task.heldout says, by default as in training. It "
        "is the mean over prompts of the share of a prompt's samples that pass.",
        "Falls while reward/pass_rate rises: the policy overfits or exploits the reward."),
    Metric("eval/pass_rate_greedy", "fraction", "higher", EVALUATION, MODES,
        "Pass rate at temperature 0 on the held-out prompts of the sources with greedy on.",
        "Below eval/pass_rate: the most likely answer is wrong, and only random samples are right."),
    Metric("eval/source/<name>", "fraction", "higher", EVALUATION, MODES,
        "eval/pass_rate of the prompts of one source of task.heldout. Logged only where there are several.",
        "One source falls while another rises: the policy forgets."),
    Metric("eval/pass_at/<name>", "fraction", "higher", EVALUATION, MODES,
        "pass@k of a source with pass_at, as eval/pass_at/SOURCE/K: the probability that at least one of K samples of "
        "a prompt passes, estimated without bias from all its samples (arXiv 2107.03374).",
        "Falls while the pass rate rises: the policy is surer of what it could do before, and gives up the rest."),
    Metric("eval/low/<name>", "fraction", "neutral", EVALUATION, MODES,
        "Lower end of the 95% interval of eval/NAME, as eval/low/NAME, such as eval/low/pass_rate. The interval covers "
        "the choice of prompts and the sampling; prompts are its clusters.",
        "A change that is smaller than the intervals may be chance: use more prompts."),
    Metric("eval/high/<name>", "fraction", "neutral", EVALUATION, MODES,
        "Upper end of the 95% interval of eval/NAME, as eval/high/NAME.",
        "As eval/low."),
    Metric("eval/level/<name>", "fraction", "higher", EVALUATION, MODES,
        "eval/pass_rate of the prompts of one difficulty level.",
        "An easy level falls while a hard one rises: the policy forgets."),
)
# fmt: on
