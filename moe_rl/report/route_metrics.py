"""Lists the metrics of routes and of what travels between sampler and trainer: traces and weights."""

from __future__ import annotations

from moe_rl.report.metric import REPLAYED, Metric

# fmt: off
ROUTES = (
    # Do sampler and trainer agree on the routes?
    Metric("routing/shadow_mismatch", "fraction", "lower",
        "Fraction of the (token, MoE layer) positions where the trainer, inside the replayed forward, would choose "
        "another set of experts than the recorded one. This is the disagreement of each router alone: replay has "
        "removed what earlier layers add to it.",
        "As high as routing/native_mismatch: the routers themselves disagree. Look at dtype, gate weights and sync.",
        modes=("r3",)),
    Metric("routing/shadow_overlap", "fraction", "higher",
        "Fraction of the recorded experts that the trainer would also choose inside the replayed forward. Mean over "
        "the (token, MoE layer) positions.",
        "Far below 1 - routing/shadow_mismatch / top-k: sets that differ do so in several experts.",
        modes=("r3",)),
    Metric("routing/shadow_margin", "score", "lower",
        "How far the lowest recorded expert scores below the lowest expert that the trainer would choose, inside the "
        "replayed forward. Mean over the (token, MoE layer) positions; 0 where the sets agree. The score is what the "
        "router ranks by: logits in nats under softmax, biased scores under sigmoid.",
        "Grows: engines disagree on clear choices, not only on near ties at the edge of the top-k.",
        modes=("r3",)),
    Metric("routing/shadow_mismatch_layer/<name>", "fraction", "lower",
        "routing/shadow_mismatch of one MoE layer. The name is the layer's global number.",
        "One layer far above its neighbours: its gate's weights or precision differ between the engines.",
        "when measured", modes=("r3",)),
    Metric("routing/alignment_power", "fraction", "higher",
        "Fraction of the (token, MoE layer) positions of which this step's alignment test would have told that their "
        "routes are another token's, layer's or sequence's: those in a layer and in a piece of a sequence that show "
        "enough for a false alarm rate of one pass in a million. The test compares the recorded routes with the "
        "trainer's own choice before the first update under them (guards.alignment).",
        "Low: few tokens a rank, short sequences, or routers that choose alike for all tokens. Faults there would be "
        "seen by the checksums alone.",
        "when measured", modes=("r3",)),
    Metric("routing/alignment_margin", "fraction", "higher",
        "By how much more of its experts the record of an MoE layer shares with the trainer's own choice for its rows "
        "than with the best rival: another layer, or the same one some tokens before or behind. In the worst layer.",
        "Falls towards 0: the two engines disagree, or neighbouring tokens route alike. Below 0 the run ends.",
        "when measured", modes=("r3",)),
    Metric("routing/native_mismatch", "fraction", "lower",
        "Fraction of the (token, MoE layer) positions where a forward that routes natively chooses another set of "
        "experts than the recorded one. It counts the disagreement of each router and what follows from it in later "
        "layers.",
        "A few percent to 0.1 is usual for bf16 engines. Near 1: the weights differ, or the trace is shifted.",
        "when measured"),
    Metric("routing/native_token_mismatch", "fraction", "lower",
        "Fraction of the tokens whose set differs in at least one MoE layer, in a forward that routes natively.",
        "Grows with the number of layers: in deep models it is near 1 even when routing/native_mismatch is small.",
        "when measured"),
    Metric("routing/native_overlap", "fraction", "higher",
        "routing/shadow_overlap in a forward that routes natively.",
        "See routing/shadow_overlap.",
        "when measured"),
    Metric("routing/native_margin", "score", "lower",
        "routing/shadow_margin in a forward that routes natively.",
        "See routing/shadow_margin.",
        "when measured"),
    Metric("routing/native_mismatch_layer/<name>", "fraction", "lower",
        "routing/native_mismatch of one MoE layer. The name is the layer's global number.",
        "One layer far above its neighbours: its gate's weights or precision differ between the engines.",
        "when measured", modes=("r2", "off")),
    Metric("routing/applied_mismatch", "count", "must be 0",
        "(sequence, MoE layer) pairs with a row that went to other experts than recorded. It is found by a checksum "
        "over request, position, token, layer and experts. This is an integrity check: 0 says that replay did what it "
        "should, not that it helped.",
        "Above 0: replay is broken, and the run ends.",
        modes=REPLAYED),
    Metric("routing/coverage", "fraction", "must be 1",
        "Fraction of the (trained token, MoE layer) positions with a recorded route that may be replayed.",
        "Below 1: some positions are routed natively, as replay.missing and replay.stale allow.",
        modes=REPLAYED),
    Metric("routing/fallback_positions", "count", "must be 0",
        "(trained token, MoE layer) positions that are routed natively because their routes are missing or stale. "
        "Above replay.max_fallback_fraction the run ends.",
        "Above 0: the sampler did not record everything. See engine.log.",
        modes=REPLAYED),
    Metric("routing/dropped_sequences", "count", "must be 0",
        "Sequences that are not trained on because routes are missing (replay.missing: drop). Above "
        "replay.max_fallback_fraction the run ends.",
        "Above 0: the sampler did not record everything. See engine.log.",
        modes=REPLAYED),
    Metric("routing/stale_tokens", "count", "neutral",
        "Trained tokens whose routes were chosen by older weights (replay.stale).",
        "Most of the tokens: the sampler lags behind.",
        modes=REPLAYED),
    Metric("routing/load_excess", "fraction", "lower",
        "(token, expert) pairs of the fullest expert-parallel rank / the mean over these ranks, minus 1. Pairs are "
        "summed over microbatches and layers and follow the sampler's routes (under r2 the trainer's own routes differ "
        "a little).",
        "High: every layer waits for the fullest rank. Try train.packing: load. It cannot even out experts that are "
        "popular in the whole batch.",
        modes=REPLAYED),
    Metric("routing/packed_by_length", "count", "neutral",
        "Updates of the step whose microbatches were packed by length. Under train.packing: load these are the updates "
        "for which no more even packing was found; otherwise they are all updates.",
        "Not 0 under train.packing: load: the same experts are popular in all sequences, or there is only one round of "
        "microbatches. Placement can help then, packing cannot.",
        modes=REPLAYED),
    Metric("routing/consumed", "count", "must equal routing/expected",
        "How often recorded routes were taken in this step: once for each (microbatch, layer) in each pass over it, as "
        "the replay ledger counts.",
        "Fewer than expected: a layer was skipped. More: one was replayed twice.",
        modes=REPLAYED),
    Metric("routing/expected", "count", "neutral",
        "How often recorded routes had to be taken in this step: for every (microbatch, layer) once forward and once "
        "per recomputation.",
        "Differs between steps of equal shape: the plan changed.",
        modes=REPLAYED),
    Metric("routing/planned_fraction", "fraction", "higher",
        "Fraction of the dispatches under replay, recomputations included, that followed a plan made from the routes "
        "beforehand. A dispatch is one (microbatch, MoE layer). A planned one exchanges no counts and does not make "
        "the host wait.",
        "Below 1 with replay.plan: a microbatch of some rank has rows without a route (replay.missing, replay.stale).",
        modes=REPLAYED),
    Metric("routing/peak_rows", "count", "neutral",
        "Most rows that the experts of any rank get in one layer of one microbatch. A row is a (token, expert) pair; "
        "padding counts. The plans tell it before the first pass; it is 0 without plans.",
        "High: activations need memory for it. replay.max_rows bounds it; --plan --trace shows it for recorded "
        "batches, beside the worst case.",
        modes=REPLAYED),
    # Where experts lie.
    Metric("placement/excess_before", "fraction", "lower",
        "routing/load_excess of the routes from which a placement of experts was planned, with the experts where they "
        "were: (token, expert) pairs of the fullest expert-parallel rank / the mean over these ranks, minus 1, summed "
        "over steps and layers. Logged only with placement.experts: traced, in steps with a plan.",
        "As high as before the last plan: popularity changes faster than placement.every_steps.",
        "when measured"),
    Metric("placement/excess_after", "fraction", "lower",
        "The same with the experts where the plan puts them. routing/load_excess would be this if every microbatch had "
        "the mean popularity.",
        "Not below placement/excess_before: no move was worth it, or a single expert has more than a rank's share.",
        "when measured"),
    Metric("placement/experts_moved", "count", "neutral",
        "Experts, over all layers, that the plan moved to another rank.",
        "Many in every plan for a small gain: raise placement.min_gain or lower placement.max_moved.",
        "when measured"),
)

CARRIED = (
    Metric("trace/bytes_per_token", "bytes/token", "lower",
        "trace/bytes over the tokens of the sequences: routes in all layers and, where asked for, sampling support and "
        "router logits. A prompt that sequences share is stored once and counts in each.",
        "Above layers x top_k x bytes per id when only routes are stored: the codec costs more than it saves."),
    Metric("trace/bytes", "bytes", "lower",
        "Stored bytes of everything that this step recorded.",
        "Grows while completions do not get longer: shards are padded."),
    # Does the sampler hold the trainer's weights?
    Metric("sync/canary_abs_diff", "nats", "lower",
        "Mean |logprob difference| of the canary, some 256 fixed tokens that both engines score after the sync, both "
        "routing natively; of the sampler that is farthest off.",
        "Jumps and stays high: the sampler holds other weights than the trainer. Above guards.max_canary_difference, "
        "or far above what the run has shown, the run ends."),
    Metric("sync/canary_mismatch", "fraction", "lower",
        "Fraction of the canary's (token, MoE layer) positions where sampler and trainer choose other sets of experts.",
        "Jumps: routers are not those of the trainer. A layer that agrees better with another one, and two experts "
        "that take each other's tokens, end the run.",
        "when measured"),
    Metric("sync/canary_power", "fraction", "higher",
        "Fraction of the MoE layers of which the canary would have told that the sampler's routes are of nothing that "
        "was tried.",
        "Below 1: the canary is too short, see rollout.max_prompt_tokens, or a router chooses alike for all tokens.",
        "when measured"),
    Metric("sync/canary_recorded", "fraction", "higher",
        "Fraction of the samplers that recorded the routes of the canary.",
        "Below 1: of the others only the log-probabilities are compared."),
    Metric("sync/bytes", "bytes", "neutral",
        "Bytes of weights sent to the sampler.",
        "Changes between steps: tensors are missing."),
)
# fmt: on
