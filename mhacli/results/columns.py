"""The columns of tables that are not about heads: what stands above them, in JSON, and what they mean.

The screens take headings from here, `mha explain` and docs/READING.md explanations. `STATISTICS` are the columns of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ColumnText(NamedTuple):
    """A column's `heading` and `explanation` in sentences; `also` are other names of it, those of JSON fields among them."""

    heading: str
    explanation: str
    also: tuple[str, ...] = ()


BENCH_COLUMNS: Mapping[str, ColumnText] = {
    "size": ColumnText(
        "tokens",
        "The number of tokens, or batch × length. With --decode, of the keys that one query reads.",
        ("k_len",),
    ),
    "backend": ColumnText(
        "backend",
        "What was called. → names the kernel that really ran where the name does not say so, ! an unfused fallback where a "
        "fused kernel was expected.",
        ("ran",),
    ),
    "median": ColumnText(
        "median",
        "The median time of a call. All backends take turns in shuffled rounds, so what slows the machine down slows all of "
        "them down. ~ marks less than a millisecond: mostly the cost of calling torch, not of attention. On a CPU, caches are"
        " as warm as the call before left them.",
        ("median_s",),
    ),
    "quartiles": ColumnText(
        "p25–p75", "The quartiles of the times: half of the rounds lie between them.", ("p25_s", "p75_s")
    ),
    "min": ColumnText("min", "The shortest time.", ("min_s",)),
    "n": ColumnText("n", "The number of rounds.", ("n_samples", "rounds")),
    "first": ColumnText("first", "The time of the first call, with all that it compiles.", ("first_s",)),
    "ratio": ColumnText(
        "ratio",
        "The median divided by that of the fastest backend of the same size, which is the first row. * marks the one that is "
        "surely the fastest; ≈ one that is not surely slower, because the interval of its ratio reaches into the noise; ? "
        "uncertain times: too few rounds, or other processes on the same CPUs.",
    ),
    "interval": ColumnText(
        "95 % interval",
        "Where the ratio lies with a probability of 95 %, from the ratios of the times round by round.",
        ("ratio_low", "ratio_high", "interval"),
    ),
    "noise": ColumnText(
        "noise of",
        "One backend is timed twice in each round, and this is how far it differs from itself: the end of the 95 % interval "
        "of that ratio which is farther from 1. A smaller ratio between two backends is no difference; the interval in the row "
        "holds all ratios that are none.",
        ("noise", "again"),
    ),
    "bar": ColumnText("speed", "A bar that is longest for the fastest backend of the size.", ()),
    "rate": ColumnText("GFLOP/s", "Operations per second, those on masked pairs left out.", ("TFLOP/s", "tflops")),
    "intensity": ColumnText("FLOP/B", "Operations per byte that has to be moved.", ("flops_per_byte",)),
    "share": ColumnText(
        "peak",
        "The least time that this machine needs for the work, in percent of the median. c: the rate of its best matrix "
        "product sets that time, m: the rate of its best copy. Above 100 % a backend was faster than these rates: its data "
        "came from a cache, or the machine was busy while they were measured.",
        ("share_of_peak",),
    ),
    "memory": ColumnText(
        "memory",
        "The most memory beyond the inputs: on a CPU in a fresh process for each row, on CUDA by its allocator.",
        ("extra_bytes",),
    ),
    "predicted": ColumnText("predicted", "The memory beyond the inputs by formula.", ("predicted_bytes",)),
    "error": ColumnText("error", "The largest difference from float64 on the same inputs.", ("max_error",)),
    "mean": ColumnText("mean error", "The mean difference from float64 on the same inputs.", ("mean_error",)),
    "change": ColumnText(
        "now / then",
        "With --compare, the median divided by that in the saved run: above 1 is slower. Runs share no rounds, so the "
        "interval beside it is that of both medians. ≈ marks a change within the noise of both runs and of the machine's own "
        "speed.",
        ("now/then", "now", "then", "95 % of both"),
    ),
}

STEP_COLUMNS: Mapping[str, ColumnText] = {
    "number": ColumnText("step", "The number of the step. Each step reads its new tokens in one pass."),
    "phase": ColumnText(
        "phase",
        "How tokens come in. prefill: the first --prompt-len tokens at once. decode: one token.",
        ("prefill", "decode"),
    ),
    "tokens": ColumnText("new tokens", "The tokens that come in; of a batch those of each sequence, between bars."),
    "sees": ColumnText("sees", "How many keys the last new token meets: those of all tokens so far."),
    "appends": ColumnText("appends", "Bytes of keys and values that the step adds to the cache."),
    "reads": ColumnText("reads", "Bytes of keys and values that attention reads from the cache."),
    "difference": ColumnText("difference", "The largest difference of the output from that of a full computation."),
}

DECODE_COLUMNS: Mapping[str, ColumnText] = {
    "length": ColumnText("length", "The number of tokens of the sequence."),
    "cache": ColumnText(
        "cache",
        "How keys and values of earlier tokens are kept. none: no cache, every step recomputes them. concat: each step "
        "copies them into new tensors. preallocated: each step writes its own into memory allocated at the beginning.",
        ("none", "concat", "preallocated"),
    ),
    "step": ColumnText("a step", "The median time of the last step of the length: one more token."),
    "faster": ColumnText(
        "speed-up",
        "The time of a step without a cache divided by that with this one: below 1 the cache is slower.",
        ("faster",),
    ),
    "flops": ColumnText("FLOPs", "Operations of the step by formula."),
    "step_bytes": ColumnText("moved", "Bytes of keys and values that the step reads and writes."),
    "total": ColumnText(
        "all steps",
        "The median times of the steps from 1 token to the length, added. ≈ marks a sum of which some steps were timed and "
        "those between them interpolated.",
    ),
    "total_bytes": ColumnText("moved in all", "Bytes of keys and values that all steps together read and write."),
    "holds": ColumnText("holds", "Bytes that the cache keeps."),
}

EFFECT_COLUMNS: Mapping[str, ColumnText] = {
    "removed": ColumnText(
        "removed",
        "What was taken out: a head as LAYER.HEAD, several with +, edges as the two tokens, or what a span reads.",
    ),
    "edge": ColumnText(
        "from → to", "The query whose attention weight was removed, and the key that it attended to.", ("edge",)
    ),
    "type": ColumnText("type", "The type of the head on this text.", ("head type",)),
    "d_logit": ColumnText(
        "Δlogit",
        "The change of the target's logit by the removal, or of its difference from that of --versus. Negative: what was "
        "removed supports the target.",
        ("d_logit",),
    ),
    "direct": ColumnText(
        "direct",
        "The part of Δlogit that needs no later layer: what the head's own output added to the logit is gone. direct? marks "
        "numbers of a model whose parts do not add up to its logit.",
        ("direct effect", "direct logit attribution"),
    ),
    "later": ColumnText(
        "later",
        "Δlogit − direct: what later layers do about the loss. With the sign of direct they amplify it, against it they "
        "repair it.",
        ("later layers",),
    ),
    "first_order": ColumnText(
        "1st order",
        "What Δlogit would be if the model were linear, by its gradient. Where softmax is saturated it is far too small.",
        ("first order", "attribution patching"),
    ),
    "d_logprob": ColumnText(
        "Δlogprob", "The change of the target's log probability by the removal, in nats.", ("d_logprob",)
    ),
    "kl": ColumnText(
        "KL",
        "How far the removal moves the whole distribution of the next token, in nats. 0: it changes nothing.",
        ("kl", "KL divergence"),
    ),
    "rank": ColumnText("rank", "The place of the target among all tokens after the removal; 0 is the likeliest.", ()),
    "d_output": ColumnText(
        "Δoutput",
        "The length of the change of the last hidden state, divided by the length of that state.",
        ("d_output",),
    ),
}

EFFECT_WORDS = ("removed", "edge", "type")
"""The columns that name a removal."""
EFFECT_NUMBERS = tuple(name for name in EFFECT_COLUMNS if name not in EFFECT_WORDS)
"""The columns of what it changes: fields and properties of `Effect`."""

DOCTOR_COLUMNS: Mapping[str, ColumnText] = {
    "found": ColumnText(
        "found",
        "The largest change of a token's output that a check saw, relative to the usual size of an output. Of finite and bos "
        "a count, of row-sums the largest distance of a sum from 1.",
        ("value",),
    ),
    "tolerance": ColumnText(
        "at most",
        "What the number before it may be. Of a checkpoint it is measured: 8 times what one rounding step in every part of "
        "the model changes.",
        ("tolerance",),
    ),
    "error": ColumnText("error", "The largest difference of attention from the same in float64.", ("max_error",)),
    "row_sum": ColumnText(
        "rows − 1", "The largest distance of a row's sum of attention weights from 1.", ("row_sum_error",)
    ),
    "masked": ColumnText("masked", "The largest attention weight of a masked cell; it has to be 0.", ("forbidden",)),
    "empty": ColumnText("no keys", "The largest output of a query that sees no key; it has to be 0.", ("empty",)),
    "loud": ColumnText(
        "scores × 1000", "Whether results stay finite where the scores are a thousand times as large.", ("loud",)
    ),
}

DIFF_COLUMNS: Mapping[str, ColumnText] = {
    "numbers": ColumnText("numbers", "How many numbers of a site were compared.", ("n_cells",)),
    "others": ColumnText("others", "How many of them are not equal, by however little.", ("n_different",)),
    "largest": ColumnText(
        "largest", "The largest |B − A| of the numbers that are finite in both. The last column says where."
    ),
    "relative": ColumnText(
        "relative", "That difference divided by the largest number of the site in A or B; the tolerance limits it."
    ),
    "identical": ColumnText("same bits", "Every number was compared, and is the same to the last bit.", ("identical",)),
    "within": ColumnText("within", "The numbers differ by no more than the tolerance."),
    "beyond": ColumnText(
        "DIFFERS",
        "Some number differs by more than the tolerance, or the formula where no numbers were saved.",
        ("beyond",),
    ),
}
