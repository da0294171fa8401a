"""The columns of tables other than head statistics: heading, JSON name and explanation.

The screens take headings from here; `mha explain` and docs/READING.md take explanations. `STATISTICS` has the columns
of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ColumnText(NamedTuple):
    """A column's heading and explanation. `also` are its other names, those of JSON fields included."""

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
        "The backend that was called. → names the kernel that ran, if the name does not; ! marks an unfused fallback where a "
        "fused kernel was expected.",
        ("ran",),
    ),
    "median": ColumnText(
        "median",
        "The median time of a call. All backends take turns in shuffled rounds, so a disturbance of the machine slows all of "
        "them. ~ marks less than a millisecond: mostly the cost of calling torch, not of attention. On a CPU, each call finds "
        "the caches as the call before left them.",
        ("median_s",),
    ),
    "quartiles": ColumnText(
        "p25–p75", "The quartiles of the times: half of the rounds lie between them.", ("p25_s", "p75_s")
    ),
    "min": ColumnText("min", "The shortest time.", ("min_s",)),
    "n": ColumnText("n", "The number of rounds.", ("n_samples", "rounds")),
    "first": ColumnText("first", "The time of the first call, compilation included.", ("first_s",)),
    "ratio": ColumnText(
        "ratio",
        "The median divided by that of the fastest backend of the same size, which is the first row. * marks a backend that is "
        "certainly the fastest; ≈ one that is not certainly slower, because the interval of its ratio contains 1.",
    ),
    "interval": ColumnText(
        "95 % interval",
        "Where the ratio lies with a probability of 95 %, from the ratios of the times round by round.",
        ("ratio_low", "ratio_high", "interval"),
    ),
    "bar": ColumnText("speed", "A bar that is longest for the fastest backend of the size.", ()),
    "rate": ColumnText(
        "GFLOP/s", "Operations per second; those on masked pairs are not counted.", ("TFLOP/s", "tflops")
    ),
    "intensity": ColumnText("FLOP/B", "Operations per byte of memory traffic.", ("flops_per_byte",)),
    "memory": ColumnText(
        "memory",
        "The most memory that torch's allocator held at a time for one call, its results included.",
        ("extra_bytes",),
    ),
    "error": ColumnText("error", "The largest difference from float64 on the same inputs.", ("max_error",)),
    "mean": ColumnText("mean error", "The mean difference from float64 on the same inputs.", ("mean_error",)),
    "change": ColumnText(
        "now / then",
        "With --compare, the median divided by that in the saved run: above 1 is slower. Runs share no rounds, so the "
        "interval beside it is that of both medians. ≈ marks an interval that contains 1.",
        ("now/then", "now", "then", "95 % of both"),
    ),
}

STEP_COLUMNS: Mapping[str, ColumnText] = {
    "number": ColumnText("step", "The number of the step. Each step reads its new tokens in one pass."),
    "phase": ColumnText(
        "phase",
        "How the step reads tokens. prefill: the first --prompt-len tokens at once. decode: one token.",
        ("prefill", "decode"),
    ),
    "tokens": ColumnText(
        "new tokens", "The tokens that the step reads; in a batch those of each sequence, separated by bars."
    ),
    "sees": ColumnText("sees", "How many keys the last new token attends to: those of all tokens so far."),
    "appends": ColumnText("appends", "Bytes of keys and values that the step adds to the cache."),
    "reads": ColumnText("reads", "Bytes of keys and values that attention reads from the cache."),
    "difference": ColumnText("difference", "The largest difference of the output from that of a full computation."),
}

DECODE_COLUMNS: Mapping[str, ColumnText] = {
    "length": ColumnText("length", "The number of tokens of the sequence."),
    "cache": ColumnText(
        "cache",
        "How keys and values of earlier tokens are stored. none: no cache, every step recomputes them. concat: each step "
        "copies them into new tensors. preallocated: each step writes its own into memory allocated at the beginning.",
        ("none", "concat", "preallocated"),
    ),
    "step": ColumnText("a step", "The median time of the last step: one more token, at that length."),
    "faster": ColumnText(
        "speed-up",
        "The time of a step without a cache divided by the time with this cache: below 1 the cache is slower.",
        ("faster",),
    ),
    "flops": ColumnText("FLOPs", "Operations of the step, computed by formula."),
    "step_bytes": ColumnText("moved", "Bytes of keys and values that the step reads and writes."),
    "total": ColumnText(
        "all steps",
        "The sum of the median times of all steps from 1 token to the length. ≈: only some steps were timed, and those between "
        "them interpolated.",
    ),
    "total_bytes": ColumnText("moved in all", "Bytes of keys and values that all steps together read and write."),
    "holds": ColumnText("holds", "Size of the cache in bytes."),
}

EFFECT_COLUMNS: Mapping[str, ColumnText] = {
    "removed": ColumnText(
        "removed",
        "The removed head as LAYER.HEAD, several joined by +; the removed weight as its two tokens; or the two spans of --cut.",
    ),
    "edge": ColumnText(
        "from → to", "The query whose attention weight was removed, and the key that it attended to.", ("edge",)
    ),
    "type": ColumnText("type", "The type of the head on this text.", ("head type",)),
    "d_logit": ColumnText(
        "Δlogit",
        "How the removal changes the target's logit, or its difference from the logit of --versus. Negative: what was removed "
        "supports the target.",
        ("d_logit",),
    ),
    "direct": ColumnText(
        "direct",
        "The part of Δlogit that needs no later layer: the head's own contribution to the logit is gone. direct? marks a model "
        "whose logit is not the sum of such contributions.",
        ("direct effect", "direct logit attribution"),
    ),
    "later": ColumnText(
        "later",
        "Δlogit − direct: how later layers react to the loss. With the same sign as direct they amplify it, with the opposite "
        "sign they repair it.",
        ("later layers",),
    ),
    "first_order": ColumnText(
        "1st order",
        "An estimate of Δlogit by the gradient, as if the model were linear. Where a softmax is saturated it is far too small.",
        ("first order", "attribution patching"),
    ),
    "d_logprob": ColumnText(
        "Δlogprob", "How the removal changes the target's log probability, in nats.", ("d_logprob",)
    ),
    "kl": ColumnText(
        "KL",
        "How far the removal moves the whole distribution of the next token, in nats. 0: it changes nothing.",
        ("kl", "KL divergence"),
    ),
    "rank": ColumnText("rank", "The place of the target among all tokens after the removal; 0 is the most likely.", ()),
    "d_output": ColumnText(
        "Δoutput",
        "The length of the change of the last hidden state, divided by the length of that state.",
        ("d_output",),
    ),
}

EFFECT_WORDS = ("removed", "edge", "type")
"""The columns that name a removal."""
EFFECT_NUMBERS = tuple(name for name in EFFECT_COLUMNS if name not in EFFECT_WORDS)
"""The columns of a removal's effect: fields and properties of `Effect`."""

DOCTOR_COLUMNS: Mapping[str, ColumnText] = {
    "found": ColumnText(
        "found",
        "The largest change of a token's output in this check, relative to the typical size of an output. For finite and bos "
        "a count, for row-sums the largest deviation of a sum from 1.",
        ("value",),
    ),
    "tolerance": ColumnText(
        "at most",
        "The limit for the number before it. For a checkpoint it is measured: 8 times the change that one rounding step in "
        "every part of the model causes.",
        ("tolerance",),
    ),
    "error": ColumnText("error", "The largest difference from attention in float64.", ("max_error",)),
    "row_sum": ColumnText(
        "rows − 1", "The largest deviation of a row's sum of attention weights from 1.", ("row_sum_error",)
    ),
    "masked": ColumnText("masked", "The largest attention weight of a masked cell; it must be 0.", ("forbidden",)),
    "empty": ColumnText("no keys", "The largest output of a query that sees no key; it must be 0.", ("empty",)),
    "loud": ColumnText(
        "scores × 1000", "Whether results stay finite if the scores are a thousand times as large.", ("loud",)
    ),
}

DIFF_COLUMNS: Mapping[str, ColumnText] = {
    "numbers": ColumnText("numbers", "How many numbers of a site were compared.", ("n_cells",)),
    "others": ColumnText("others", "How many of them are not exactly equal.", ("n_different",)),
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
        "Some number differs by more than the tolerance; if no numbers were saved, the formula differs.",
        ("beyond",),
    ),
}
