"""Lists the metrics of routes, traces and weight syncs."""

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
    """Describes one reported number. A key ending in `<name>` stands for a family, with one member per name.

    Attributes:
        when: "every step": required in each training line. "when measured": may be absent. "evaluation": only in
            evaluation lines.
        modes: the values of replay.mode under which the metric exists. Other modes reject it.
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


# fmt: off
ROUTES = (
    # Agreement of sampler and trainer on the routes.
    Metric("routing/shadow_mismatch", "fraction", "lower",
        "Fraction of the (token, MoE layer) positions where the trainer, inside the replayed "
        "forward, would choose another set of experts than the recorded one. It shows the "
        "disagreement of each router alone, because replay removes the effect of earlier layers.",
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
        "How much this step's alignment test could see: the mean, over its core claims and the ranks, of the share of "
        "planted faults that it would have refused. The test compares the recorded routes with the scores of the "
        "trainer's routers before the first update under them (guards.alignment). Core claims are those about rows of "
        "another layer, token, prompt or completion, or of nothing.",
        "Low: few tokens per rank, short sequences, or routers that choose alike for all tokens. "
        "Only the checksums would detect such faults.",
        "when measured", modes=("r3",)),
    Metric("routing/alignment_evidence", "nats", "lower",
        "Largest evidence against a claim of the alignment test, on any rank, minus the evidence that refuses it; "
        "-1000 where nothing was tested.",
        "Rises towards 0: the engines disagree more and more. At 0 the run ends.",
        "when measured", modes=("r3",)),
    Metric("routing/alignment_moved", "weight", "neutral",
        "Learning rate x updates since the oldest row was sampled: about the largest distance of a weight from its "
        "value then.",
        "Above 0.005: routes of older weights may be unrelated to their rows. Then the claims prompts, completions, "
        "no_rows and pieces are weak.",
        "when measured", modes=("r3",)),
    Metric("routing/proven/<name>", "fraction", "higher",
        "Fraction of the ranks on which the alignment test has proven this claim: it would have refused 95% of the "
        "faults that it planted into this step. docs/internals/alignment.md lists the claims.",
        "Falls: the claim is weak, and its fault would pass. Equal rows, short completions and older weights do that.",
        "when measured", modes=("r3",)),
    Metric("routing/native_mismatch", "fraction", "lower",
        "Fraction of the (token, MoE layer) positions where a forward that routes natively "
        "chooses another set of experts than the recorded one. It includes the disagreement of "
        "each router and its effect on later layers.",
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
    Metric("routing/shadow_mismatch_lag/<name>", "fraction", "lower",
        "routing/shadow_mismatch of the rows that were routed this many weight versions before the trainer's: 0, 1, "
        "2-3, 4-7 or 8+. Logged only for lags that occur, and not where all tokens and rows are of lag 0.",
        "Lag 0 above routing/shadow_mismatch of a synchronous run: a fault, not staleness.",
        "when measured", modes=("r3",)),
    Metric("routing/native_mismatch_lag/<name>", "fraction", "lower",
        "routing/native_mismatch of the rows that were routed this many weight versions before the trainer's.",
        "See routing/shadow_mismatch_lag/<name>.",
        "when measured", modes=("r2", "off")),
    Metric("routing/applied_mismatch", "count", "must be 0",
        "Number of (sequence, MoE layer) pairs with a row that went to other experts than "
        "recorded. A checksum over request, position, token, layer and experts finds them. This "
        "is an integrity check: 0 says that replay was applied, not that it helped.",
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
        "Pairs of the fullest expert-parallel rank / the mean over these ranks, minus 1. A pair "
        "is a (token, expert) choice. Pairs are summed over microbatches and layers and follow "
        "the sampler's routes (under r2 the trainer's own routes differ a little).",
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
        "Number of times that recorded routes were applied in this step, from the replay ledger: "
        "once per (microbatch, layer) in each pass.",
        "Fewer than expected: a layer was skipped. More: one was replayed twice.",
        modes=REPLAYED),
    Metric("routing/expected", "count", "neutral",
        "Number of times that recorded routes had to be applied in this step: for every "
        "(microbatch, layer) once forward and once per recomputation.",
        "Differs between steps of equal shape: the plan changed.",
        modes=REPLAYED),
    Metric("routing/planned_fraction", "fraction", "higher",
        "Fraction of the dispatches under replay, recomputations included, that followed a plan "
        "computed from the routes in advance. A dispatch is one (microbatch, MoE layer). A "
        "planned dispatch exchanges no counts and does not make the host wait.",
        "Below 1 with replay.plan: a microbatch of some rank has rows without a route (replay.missing, replay.stale).",
        modes=REPLAYED),
    Metric("routing/peak_rows", "count", "neutral",
        "Largest number of rows that the experts of any rank get in one layer of one microbatch. "
        "A row is a (token, expert) pair; padding counts. The dispatch plans give it before the "
        "first pass. It is 0 without plans.",
        "High: activations need much memory. replay.max_rows limits it. --plan --trace shows it "
        "for recorded batches, beside the worst case.",
        modes=REPLAYED),
    # Placement of experts.
    Metric("placement/excess_before", "fraction", "lower",
        "routing/load_excess before the new placement of experts. It is computed from the routes "
        "that the plan used, summed over steps and layers. Logged only with placement.experts: "
        "traced, in steps with a plan.",
        "As high as before the last plan: popularity changes faster than placement.every_steps.",
        "when measured"),
    Metric("placement/excess_after", "fraction", "lower",
        "placement/excess_before for the planned placement. routing/load_excess would have this "
        "value if every microbatch had the mean popularity of experts.",
        "Not below placement/excess_before: no move gained enough, or a single expert has more "
        "than a rank's share.",
        "when measured"),
    Metric("placement/excess_copied", "fraction", "lower",
        "routing/load_excess with the copies of experts that the dispatch plans make. Padding counts. Logged only with "
        "placement.copies.",
        "Not below routing/load_excess: raise placement.copies, or lower placement.least_copied_rows. Ranks in several "
        "nodes also use copies to keep rows within a node.",
        "when measured"),
    Metric("placement/experts_moved", "count", "neutral",
        "Number of experts, over all layers, that the plan moved to another rank.",
        "Many in every plan for a small gain: raise placement.min_gain or lower placement.max_moved.",
        "when measured"),
)

CARRIED = (
    Metric("trace/bytes_per_token", "bytes/token", "lower",
        "trace/bytes / tokens of the sequences: routes in all layers and, where configured, "
        "sampling support and router logits. A prompt that sequences share is stored once and "
        "counts in each.",
        "Above layers x top_k x bytes per id when only routes are stored: the codec costs more than it saves."),
    Metric("trace/bytes", "bytes", "lower",
        "Stored bytes of everything that this step recorded.",
        "Grows while completions do not get longer: shards are padded."),
    # Agreement of the sampler's weights with the trainer's.
    Metric("sync/canary_abs_diff", "nats", "lower",
        "Mean |logprob difference| of the canary, for the sampler with the largest one. The "
        "canary is about 256 fixed tokens that both engines score after the sync with native "
        "routing.",
        "Jumps and stays high: the sampler holds other weights than the trainer. The run ends "
        "above guards.max_canary_difference, or far above all earlier values of the run.",
        "when measured"),
    Metric("sync/canary_mismatch", "fraction", "lower",
        "Fraction of the canary's (token, MoE layer) positions where sampler and trainer choose other sets of experts.",
        "Jumps: the sampler's routers differ from the trainer's. The run ends if a layer agrees "
        "better with another layer, or if two experts take each other's tokens.",
        "when measured"),
    Metric("sync/canary_change", "nats", "neutral",
        "Mean |change| of the sampler's log-probabilities of the canary since the version before. With several "
        "samplers it is that of the one that changed least.",
        "Far below sync/canary_change_trainer: the update has not reached a sampler. The run ends.",
        "when measured"),
    Metric("sync/canary_change_trainer", "nats", "neutral",
        "The same of the trainer's log-probabilities.",
        "0: no weight changed.",
        "when measured"),
    Metric("sync/canary_power", "fraction", "higher",
        "Fraction of the MoE layers in which the canary could have detected wrong routes of the "
        "sampler. A layer counts if its routes agree clearly better than those of every fault "
        "that was tried.",
        "Below 1: the canary is too short (see rollout.max_prompt_tokens), or a router chooses "
        "alike for all tokens.",
        "when measured"),
    Metric("sync/canary_recorded", "fraction", "higher",
        "Fraction of the samplers that recorded the routes of the canary.",
        "Below 1: only log-probabilities are compared for the other samplers.",
        "when measured"),
    Metric("sync/bytes", "bytes", "neutral",
        "Bytes of weights sent to the sampler.",
        "Changes between steps: tensors are missing.",
        "when measured"),
)
# fmt: on
