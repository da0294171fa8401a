"""The catalogue of mistakes: wrong stages of attention.

`mha check` puts one entry after another into the reference until the outputs match. A new mistake
is a line in the function of its part, and a line in record/mistakes.toml.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from mhacli.attention import stages

from .stages import (
    LETTERS,
    Inputs,
    Letter,
    Mistake,
    NotPossible,
    Projection,
    ReferenceLayer,
    in_role,
    require,
    rotated,
)

# ------------------------------------------------------------- splitting, sharing and merging heads


_AXES = {"b": "batch", "3": "3", "h": "head", "t": "length", "d": "d_head"}
"""The axes of vectors by a letter; 3 are queries, keys and values."""
_SHAPING = (r"\b(view|reshape|unflatten|rearrange)\(",)


def _in_words(order: str) -> str:
    return f"[{', '.join(_AXES[axis] for axis in order)}]"


def of_heads() -> Iterator[Mistake]:
    """Heads of other columns or tokens, in another order or number."""
    untransposed = {
        "split": lambda layer, rows, role: rows.reshape(stages.split(layer, rows, role).shape)
    }
    for letters in ("qkv", "v", "qk", "kv", "q", "qv", "k"):
        yield Mistake(
            "split-without-transpose",
            untransposed,
            ", ".join(letters),
            at=_SHAPING,
            letters=letters,
        )
    for letters in ("q", "k", "v", "qk", "qv", "kv"):
        yield Mistake(
            "split-batch-moved", {"split": batch_moved}, ", ".join(letters), letters=letters
        )
    yield Mistake(
        "attention-over-heads",
        {"split": heads_last, "merge": lambda layer, z: z.flatten(2)},
        at=_SHAPING,
    )
    moved: stages.Stages = {
        "split": heads_last,
        "merge": lambda layer, z: z.transpose(1, 2).reshape(*z.shape[:2], -1),
    }
    yield Mistake(
        "attention-over-heads", moved, "transposed all the same when they are joined", at=_SHAPING
    )
    yield Mistake("value-not-split", {"split": with_whole_values}, changes="z")
    first: stages.Stages = {"split": with_whole_values, "merge": merged_of_first_columns}
    yield Mistake("value-not-split", first, "every head has the first columns", "z")
    for order in ("b3htd", "3bhtd", "3bthd", "b3thd", "bht3d", "bh3td"):
        wrong = {"project": partial(fused, order)}
        yield Mistake(
            "split-without-transpose, fused", wrong, _in_words(order), "q_split", _SHAPING
        )

    yield Mistake("merge-without-transpose", {"merge": partial(merged_as, "bhtd")})
    for order in ("bhdt", "btdh", "bdht", "bdth"):
        yield Mistake("merge-axis-order", {"merge": partial(merged_as, order)}, _in_words(order))
    for order in ("hbtd", "htbd", "tbhd", "thbd"):
        yield Mistake("merge-batch-moved", {"merge": partial(merged_as, order)}, _in_words(order))
    channels_last = {"merge": lambda layer, z: z.reshape(len(z), -1, z.shape[2]).mT}
    yield Mistake(
        "merge-axis-order",
        channels_last,
        "[batch, head, pixel, d_v] is read as [batch, channel, pixel]",
    )
    planes = "[batch · head, query, d_v] is read as [head, batch, query, d_v]"
    yield Mistake("merge-batch-moved", {"merge": heads_first}, planes)
    for code, how in (("heads-averaged", torch.mean), ("heads-summed", torch.sum)):
        joined: stages.Stages = {"merge": partial(joined_by, how)}
        yield Mistake(code, joined)
        yield Mistake(code, {**joined, "split": with_whole_values}, "values are not split")
    yield Mistake(
        "head-repeated", {"merge": lambda layer, z: stages.merge(layer, z[:, :1].expand_as(z))}
    )

    repeating = (r"\b(repeat|tile|expand)\(", r"\bcat\(")
    for letters, detail, site in (
        ("kv", "", ""),
        ("k", "of the keys alone", ""),
        ("v", "of the values alone", "z"),
    ):
        yield Mistake(
            "gqa-tiled", {"repeat_kv": tiled}, detail, site, at=repeating, letters=letters
        )
    yield Mistake("kv-head-shared-by-all", {"repeat_kv": first_for_all})
    yield Mistake("value-of-one-head", {"repeat_kv": first_for_all}, changes="z", letters="v")
    yield Mistake("key-of-one-head", {"repeat_kv": first_for_all}, letters="k")
    of_one = {"products": lambda layer, q, k: stages.products(layer, q[:, :1], k)}
    yield Mistake("query-of-one-head", of_one)
    first = {"value_weights": lambda layer, pattern, *_: pattern[:, :1].expand_as(pattern)}
    yield Mistake("pattern-of-one-head", first, "that of head 0", "z")
    mean = {"value_weights": lambda layer, pattern, *_: pattern.mean(1, True).expand_as(pattern)}
    yield Mistake("pattern-of-one-head", mean, "the mean", "z")


def batch_moved(layer: ReferenceLayer, rows: Tensor, role: str) -> Tensor:
    """Heads in the order head, batch instead of batch, head."""
    heads = stages.split(layer, rows, role)
    return heads.transpose(0, 1).reshape(heads.shape)


def heads_last(layer: ReferenceLayer, rows: Tensor, role: str) -> Tensor:
    """`[batch, length, head, d]` with heads in place of tokens: the heads of a token attend to each
    other.
    """
    require(layer.n_heads == layer.n_kv_heads > 1 and not layer.interleaved_split)
    require(rows.shape[-1] % layer.n_heads == 0)
    return rows.reshape(*rows.shape[:2], layer.n_heads, -1)


def with_whole_values(layer: ReferenceLayer, rows: Tensor, role: str) -> Tensor:
    """Values that are not split: every head weighs whole rows."""
    return rows[:, None] if role == "v" else stages.split(layer, rows, role)


def merged_of_first_columns(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Heads that keep as many columns as they would have if they were split."""
    return stages.merge(layer, z[..., : z.shape[-1] // z.shape[1]])


def fused(order: str, layer: ReferenceLayer, inputs: Inputs, role: str) -> Tensor:
    """Queries, keys or values of a fused projection reshaped to axes in another order."""
    require(layer.n_heads == layer.n_kv_heads and not layer.interleaved_split)
    of_queries = Inputs(inputs.queries)
    whole = torch.cat([stages.project(layer, of_queries, letter) for letter in LETTERS], dim=-1)
    sizes = {"b": whole.shape[0], "3": 3, "h": layer.n_heads, "t": whole.shape[1], "d": -1}
    require(whole.shape[-1] % (3 * layer.n_heads) == 0)
    reshaped = whole.reshape([sizes[axis] for axis in order])
    return reshaped.permute([order.index(axis) for axis in "3bthd"])["qkv".index(role)].flatten(2)


def merged_as(order: str, layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Heads merged with the axes in this order."""
    return z.permute(["bhtd".index(axis) for axis in order]).reshape(z.shape[0], z.shape[2], -1)


def heads_first(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """Planes of batch and head read in the order head, batch."""
    return stages.merge(layer, z.reshape(z.shape[1], z.shape[0], *z.shape[2:]).transpose(0, 1))


def joined_by(how: Callable[..., Tensor], layer: ReferenceLayer, z: Tensor) -> Tensor:
    """One head for all, repeated to the width of the output projection if necessary."""
    head = how(z, dim=1)
    out = None if layer.weights is None else layer.weights.out
    return (
        head
        if out is None or out.weight.shape[1] == head.shape[-1]
        else head.repeat(1, 1, z.shape[1])
    )


def tiled(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """KV heads repeated as 0 1 0 1 instead of 0 0 1 1."""
    return heads.repeat(1, layer.n_heads // heads.shape[1], 1, 1)


def first_for_all(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """The first head for every query head."""
    return heads[:, :1].expand(-1, layer.n_heads, -1, -1)


# ------------------------------------------------------------------------------- scores and softmax


def of_scores() -> Iterator[Mistake]:
    """Transposed products, another scale or cap, and weights that are not those over the keys."""
    swapped = {"products": lambda layer, q, k: stages.products(layer, k, q)}
    yield Mistake("qk-swapped", swapped, needs=("order",))
    yield Mistake("scale-twice", {"take": scaled_before}, changes="scaled", letters="q")
    yield Mistake("scale-twice", {"take": scaled_before}, changes="scaled", letters="k")
    for code, factor, detail in (
        ("scale-missing", lambda layer, qk, d: 1.0, ""),
        ("scale-d-model", lambda layer, qk, d: model_width(layer, d) ** -0.5, ""),
        ("scale-d-model", lambda layer, qk, d: 1 / model_width(layer, d), "by d_model itself"),
        ("scale-not-root", lambda layer, qk, d: 1 / d, ""),
        ("scale-one-side", lambda layer, qk, d: d**-0.25, ""),
        ("scale-length", lambda layer, qk, d: qk.shape[-1] ** -0.5, "√k_len"),
        ("scale-length", lambda layer, qk, d: qk.shape[-2] ** -0.5, "√q_len"),
        ("scale-length", lambda layer, qk, d: 1 / qk.shape[-1], "k_len"),
        ("scale-length", lambda layer, qk, d: 1 / qk.shape[-2], "q_len"),
        ("scale-batch", lambda layer, qk, d: len(qk) ** -0.5, ""),
        ("scale-heads", lambda layer, qk, d: qk.shape[1] ** -0.5, ""),
        ("scale-multiplied", lambda layer, qk, d: d**0.5, ""),
    ):
        yield Mistake(code, {"scale": partial(scaled_by, factor)}, detail)
    # as if the head filled its tile; a scale that is stated may be any number
    of_tile = partial(scaled_by, lambda layer, qk, d: (1 << (d - 1).bit_length()) ** -0.5)
    yield Mistake("scale-power-of-two", {"scale": of_tile}, needs=("scale",))
    for how, late in (
        ("scaled", stages.factor),
        ("divided by √d_model", lambda layer, d: model_width(layer, d) ** -0.5),
        ("divided by d_head", lambda layer, d: 1 / d),
        ("divided by d_model", lambda layer, d: 1 / model_width(layer, d)),
    ):
        yield Mistake("scale-after-softmax", {"value_weights": partial(scaled_weights, late)}, how)

    yield Mistake("softcap-after-mask", {"mask": capped_after_mask}, shown_by="further")
    yield Mistake("softcap-not-scaled-back", {"cap": not_scaled_back})
    yield Mistake("softcap-missing", {"cap": lambda layer, scores: scores})

    for code, softmax, detail in (
        ("softmax-axis", lambda layer, scores: scores.softmax(-2), "over queries"),
        ("softmax-axis", lambda layer, scores: scores.softmax(1), "over heads"),
        (
            "softmax-axis",
            lambda layer, scores: scores.softmax(0),
            "over the sequences of the batch",
        ),
        (
            "softmax-axis",
            lambda layer, scores: scores.flatten(-2).softmax(-1).view_as(scores),
            "over queries and keys",
        ),
        (
            "sink-dropped-wrongly",
            lambda layer, scores: stages.with_sinks(layer, scores).softmax(dim=-1)[..., 1:],
            "",
        ),
        (
            "sink-without-effect",
            lambda layer, scores: stages.softmax(replace(layer, sinks=None), scores),
            "",
        ),
        ("softmax-twice", lambda layer, scores: stages.softmax(layer, scores).softmax(dim=-1), ""),
    ):
        yield Mistake(code, {"softmax": softmax}, detail)
    yield Mistake("softmax-missing", {"softmax": lambda layer, scores: scores}, changes="z")
    around = {
        "scale": lambda *inputs: stages.scale(*inputs).softmax(dim=-1),
        "softmax": stages.softmax,
    }
    yield Mistake("softmax-twice, around the mask", around)
    overflow = {
        "softmax": lambda layer, scores: scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
    }
    yield Mistake(
        "softmax-overflow", overflow, at=(r"\bexp\(",), shown_by="further", may_be_nan=True
    )
    transposed = {"weigh": lambda layer, pattern, v: stages.weigh(layer, pattern.mT, v)}
    yield Mistake("pattern-transposed", transposed)


def capped_after_mask(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores that are capped when they are masked already: masked ones become minus the cap."""
    require(layer.softcap is not None)
    return stages.mask(layer, scores, keep, value=-(layer.softcap or 0.0))


def not_scaled_back(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """The tanh of capped scores, which is not multiplied by the cap."""
    require(layer.softcap is not None)
    return torch.tanh(scores / (layer.softcap or 1.0))


def model_width(layer: ReferenceLayer, d_head: int) -> int:
    """The width of the model; for split heads, the sum of their widths."""
    return d_head * layer.n_heads if layer.weights is None else layer.weights.q.weight.shape[1]


def scales_of_mistakes(layer: ReferenceLayer, shape: Sequence[int], d_head: int) -> Iterator[float]:
    """The scales in place of 1 / √d_head that are mistakes, for products `[batch, head, query,
    key]` of a shape.
    """
    ones = torch.ones(*shape, dtype=torch.float64)
    for mistake in of_scores():
        if mistake.stages.keys() == {"scale"}:
            with suppress(NotPossible):
                yield float(mistake.stages["scale"](layer, ones, d_head).flatten()[0])


def scaled_by(
    factor: Callable[..., float | Tensor], layer: ReferenceLayer, qk: Tensor, d_head: int
) -> Tensor:
    """Products times another factor than the right one, 1 / √d_head."""
    right, wrong = stages.factor(layer, d_head), factor(layer, qk, d_head)
    require(not isinstance(right, Tensor))  # a learned scale of each head is no mistake in a number
    given, usual = (torch.as_tensor(each, dtype=torch.float64) for each in (wrong, right))
    require(not torch.allclose(given, usual, rtol=1e-9))
    return qk * wrong


def scaled_before(layer: ReferenceLayer, qkv: Sequence[Tensor], role: str) -> Tensor:
    """Queries or keys that are scaled before their products are."""
    heads = stages.take(layer, qkv, role)
    require(heads.shape[-1] > 1)
    return stages.multiplied(heads, stages.factor(layer, heads.shape[-1]))


def scaled_weights(
    factor: Callable[..., float | Tensor],
    layer: ReferenceLayer,
    pattern: Tensor,
    scaled: Tensor,
    keep: Tensor | None,
) -> Tensor:
    """Weights of unscaled scores, scaled after the softmax."""
    require(layer.scale is not None or layer.d_head is not None)
    d_head = layer.d_head or 1
    unscaled = scaled / stages.factor(layer, d_head)
    masked = unscaled if keep is None else stages.mask(layer, unscaled, keep)
    return stages.softmax(layer, masked) * factor(layer, d_head)


# --------------------------------------------------------------------- causality, masks and padding


_TRIANGLE = ("tril", "triu")
_FILLING = (r"masked_fill|where\(",)
DROPPED = r"^(\w+)(\.(masked_fill|add)\(| [-+] )"
"""A line whose result is not kept."""


def of_masks() -> Iterator[Mistake]:
    """Other cells than those that causality, a mask and padding allow, and masked scores that are
    not −∞.
    """
    every = {"causal_rule": lambda layer, *sizes: torch.ones(sizes, dtype=torch.bool)}
    yield Mistake("causal-missing", every, at=(DROPPED,), needs=("causal",))
    for rule in (stages.causal_rule, from_top_left):
        for shift, form, detail in (
            (-1, "without itself", "a token does not see itself"),
            (1, "with the next", "a token also sees the next one"),
        ):
            moved = {"causal_rule": partial(rule, shift=shift)}
            yield Mistake(f"causal-off-by-one, {form}", moved, detail, at=_TRIANGLE)
    later = {"causal_rule": lambda layer, *sizes: ~stages.causal_rule(layer, *sizes, shift=-1)}
    yield Mistake("causal-transposed", later, at=_TRIANGLE)
    yield Mistake("causal-top-left", {"causal_rule": from_top_left}, at=(*_TRIANGLE, "is_causal"))
    yield Mistake("causal-lost", {"all_rules": callers_alone})

    yield Mistake("mask-inverted", {"mask_rule": lambda layer, allowed: ~allowed}, at=_FILLING)
    inverted = {"causal_rule": lambda layer, *sizes: ~stages.causal_rule(layer, *sizes)}
    yield Mistake("mask-inverted, of the layer", inverted, at=_FILLING)
    yield Mistake(
        "mask-ignored",
        {"mask_rule": lambda layer, allowed: torch.ones_like(allowed)},
        at=(DROPPED,),
    )
    yield Mistake("mask-transposed", {"mask_rule": lambda layer, allowed: allowed.mT})
    for code, wrong, detail in (
        ("mask-multiplied", lambda layer, scores, keep: scores * keep, ""),
        (
            "mask-multiplied",
            lambda layer, scores, keep: scores * ~keep,
            "the visible ones become 0",
        ),
        (
            "mask-added-as-01",
            lambda layer, scores, keep: scores + keep,
            "1 is added to visible scores",
        ),
        ("mask-added-as-01", partial(added_where_masked, 1.0), "1 is added to masked scores"),
        ("mask-head-order", with_planes_moved, ""),
        (
            "mask-head-order, heads outside",
            partial(with_planes_moved, is_repeated_by_text=True),
            "",
        ),
        ("mask-sign", partial(stages.mask, value=1e9), "10⁹"),
        ("mask-sign", partial(stages.mask, value=math.inf), "+∞"),
    ):
        yield Mistake(code, {"mask": wrong}, detail)
    yield Mistake(
        "mask-not-finite", {"mask": partial(added_where_masked, -math.inf)}, may_be_nan=True
    )
    visible = {"mask": lambda layer, scores, keep: scores + keep.to(scores.dtype) * -math.inf}
    yield Mistake("mask-not-finite", visible, "the mask of those that are visible", may_be_nan=True)
    yield sentinels(1e-9, "0, or next to it such as 1e-9")[0]
    yield Mistake("mask-window-order", {"mask": by_neighbours}, shown_by="further")
    for number, value in (("0", 0.0), ("−∞", -math.inf), ("−10⁹", -1e9)):
        late = {"value_weights": partial(filled_after_softmax, value)}
        yield Mistake("mask-after-softmax", late, f"masked weights are set to {number}")

    for code, padding, at in (  # for real queries, hidden queries look like ignored padding
        ("padding-of-queries", lambda layer, real: real[:, None, :, None], ()),
        (
            "padding-ignored",
            lambda layer, real: torch.ones_like(real)[:, None, None, :],
            (DROPPED,),
        ),
        ("padding-inverted", lambda layer, real: ~real[:, None, None, :], ()),
        ("padding-of-first-sequence", lambda layer, real: real[:1, None, None, :], ()),
    ):
        yield Mistake(code, {"padding_rule": padding}, at=at)


def from_top_left(layer: ReferenceLayer, *sizes: int, shift: int = 0) -> Tensor:
    """The rule of causality as if the first query stood at the first key."""
    return torch.ones(sizes, dtype=torch.bool).tril(shift)


def sentinels(value: float, words: str = "") -> list[Mistake]:
    """Masked scores that are set to a number that large scores reach, or get it added."""
    number = words or f"{value:g}"
    sentinel = partial(Mistake, "mask-sentinel-too-small", at=_FILLING, shown_by="further")
    return [
        sentinel({"mask": partial(stages.mask, value=value)}, number),
        sentinel({"mask": partial(added_where_masked, value)}, f"{number} is added"),
    ]


def multiplied(value: float) -> list[Mistake]:
    """Masked scores that are multiplied by a number which would hide them if it were added, beside
    visible ones that stay or become 0.
    """
    return [
        Mistake(
            "mask-multiplied",
            {"mask": partial(factors_of_cells, value, visible)},
            f"hidden ones by {value:g}, visible ones by {visible:g}",
        )
        for visible in (1.0, 0.0)
    ]


def factors_of_cells(
    hidden: float, visible: float, layer: ReferenceLayer, scores: Tensor, keep: Tensor
) -> Tensor:
    """Scores times one number where masked, and another elsewhere."""
    return scores * torch.where(keep, visible, hidden)


def callers_alone(layer: ReferenceLayer, rules: tuple[Tensor | None, ...]) -> Tensor | None:
    """The caller's masks alone, without causality."""
    layer_rule, caller_mask, padding = rules
    require(layer_rule is not None)
    is_alone = caller_mask is None and padding is None
    return layer_rule if is_alone else stages.all_rules(layer, (None, caller_mask, padding))


def added_where_masked(value: float, layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with a number added where masked; 0 · −∞ is NaN."""
    return scores + (~keep).to(scores.dtype) * value


def with_planes_moved(
    layer: ReferenceLayer, scores: Tensor, keep: Tensor, *, is_repeated_by_text: bool = False
) -> Tensor:
    """Scores with the planes of the mask in the order head, batch, or where the scores have this
    order, in the other one.
    """
    batch, n_heads, q_len, k_len = scores.shape
    require(keep.shape[1] == 1)
    planes = keep.expand(batch, n_heads, q_len, k_len)
    order = (n_heads, batch) if is_repeated_by_text else (batch, n_heads)
    moved = planes.reshape(*order, q_len, k_len).transpose(0, 1)
    return stages.mask(layer, scores, moved.reshape(planes.shape))


def by_neighbours(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores with the masks of two windows, 0 1 0 1, applied to neighbours, 0 0 1 1."""
    batch = len(scores)
    require(len(keep) == batch > 2 and torch.equal(keep, keep[:2].repeat(batch // 2, 1, 1, 1)))
    return stages.mask(layer, scores, keep[:2].repeat_interleave(batch // 2, dim=0))


def filled_after_softmax(
    value: float, layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None
) -> Tensor:
    """Weights of all scores, set to a number where masked after the softmax."""
    return pattern if keep is None else stages.softmax(layer, scaled).masked_fill(~keep, value)


# ---------------------------------------------------------- projections, norms and rotary positions


_NAMES: Mapping[Letter, str] = {"v": "values", "k": "keys", "q": "queries"}
"""The vectors of each role, the likelier taker of another's projection first."""


def of_projections() -> Iterator[Mistake]:
    """Queries, keys and values by other projections, by one or none, of other rows or heads, and
    with other norms.
    """
    splitting = (r"\bchunk\(", r"\bsplit\(", r"\bunbind\(", r"\btensor_split\(", r"\w\[.*\d\]")
    for order in ("qvk", "kqv", "kvq", "vqk", "vkq"):
        words = f"{', '.join(order)} serve as q, k, v"
        mistake = partial(
            Mistake,
            stages={"project": partial(projected, order, "qkv")},
            detail=words,
            letters=changed_roles(order),
        )
        yield mistake("qkv-order", at=splitting, needs=("order", "fused"))
        passing = (", *".join(rf"\b{letter}\w*" for letter in order),)
        yield mistake("qkv-order, by separate projections", at=passing, needs=("order",))
    for taker, giver in permutations(_NAMES, 2):  # the likeliest pair first
        name, roles = f"{_NAMES[taker]}-from-{_NAMES[giver]}", "qkv".replace(taker, giver)
        mistake = partial(Mistake, letters=taker, gives=giver)
        yield mistake(name, {"project": partial(projected, roles, "qkv")})
        site = "z" if taker == "v" else "qk"
        yield mistake(f"{name}, as heads", {"take": partial(exchanged, roles)}, changes=site)
    for letter in LETTERS:
        shared = {"project": partial(projected, letter * 3, "qkv")}
        yield Mistake("one-projection", shared, f"that of the {_NAMES[letter]}")
    unprojected = {"project": lambda layer, inputs, role: inputs.rows_of(role)}
    for letter, of in _NAMES.items():
        name = "projection-missing" if letter == "v" else f"projection-missing, {of}"
        yield Mistake(name, unprojected, changes=letter, letters=letter)
    for code, givers in (
        ("values-of-queries", "qkq"),
        ("values-of-keys", "qkk"),
        ("keys-of-values", "qvv"),
        ("keys-of-values", "qvk"),
        ("keys-of-queries", "qqv"),
        ("keys-of-queries, and values", "qqq"),
    ):
        wrong = {"project": partial(projected, "qkv", givers)}
        needs = ("context",) if "of-queries" in code else ()
        yield Mistake(code, wrong, letters=changed_roles(givers), needs=needs)
    for taker, giver in permutations(_NAMES, 2):
        name = "projected-twice" if taker == "v" else f"projected-twice, {_NAMES[taker]}"
        yield Mistake(
            name,
            {"project": partial(projected_twice, giver)},
            f"by the {_NAMES[giver]}",
            letters=taker,
        )
    without = {"project": partial(by_changed, unbiased)}
    for letters in ("q", "v", "qkv", "qv", "qk", "kv", "k"):
        yield Mistake("bias-missing", without, ", ".join(letters), letters=letters)
    applied = {"project": partial(by_changed, transposed)}
    for letters in ("qkv", "q", "k", "v"):
        yield Mistake("projection-transposed", applied, ", ".join(letters), letters=letters)
    yield Mistake(
        "bias-missing, of the output",
        {"project_out": partial(projected_out, unbiased)},
    )
    yield Mistake("out-proj-missing", {"project_out": lambda layer, rows: rows}, changes="concat")
    yield Mistake(
        "out-proj-transposed",
        {"project_out": partial(projected_out, transposed)},
    )
    yield from of_rotations()
    yield Mistake("qk-norm-of-one", {"norm": unchanged}, "the keys are not", "q", letters="k")
    yield Mistake("qk-norm-of-one", {"norm": unchanged}, "the queries are not", "k", letters="q")


def of_rotations() -> Iterator[Mistake]:
    """Columns that are paired otherwise than their angles, and queries or keys at other positions,
    by other angles, or not at all.
    """
    halves = "neighbouring columns are rotated by angles laid out for halves"
    neighbours = "halves are rotated by angles laid out for neighbouring columns"
    for letters, code, rotate, detail in (
        ("qk", "rope-pairing", partial(rotated, pairing="interleaved", angles="half"), halves),
        ("qk", "rope-pairing", partial(rotated, pairing="half", angles="interleaved"), neighbours),
        ("k", "rope-of-queries-only", unchanged, ""),
        ("q", "rope-of-keys-only", unchanged, ""),
        ("q", "rope-offset", partial(shifted, 1), "queries one place too far"),
        ("k", "rope-offset", partial(shifted, 1), "keys one place too far"),
        ("qk", "rope-axis", by_head, ""),
        ("qk", "rope-rates", partial(at_rates, torch.reciprocal), "they grow by theta^(2j/d)"),
        (
            "qk",
            "rope-rates",
            partial(at_rates, torch.ones_like),
            "all pairs are rotated by one angle",
        ),
        ("k", "rope-sign", partial(rotated, sign=-1), ""),
    ):
        yield Mistake(code, {"rotate": rotate}, detail, letters=letters)
    yield Mistake(
        "rope-without-minus", {"rotate": one_signed}, changes="q", at=(r"\b(cat|stack)\(",)
    )
    yield Mistake(
        "rope-pairing",
        {"rotate": other_pairing},
        "in the other of the two ways",
        needs=("pairing",),
    )
    of_values = {"take": lambda layer, qkv, role: rotated(layer, qkv[2], 0)}
    yield Mistake("rope-of-values", of_values, changes="v", letters="v")


def changed_roles(order: str) -> str:
    """The letters of q, k and v in whose place another one stands."""
    return "".join(right for right, given in zip("qkv", order, strict=True) if right != given)


def projected(weights: str, rows: str, layer: ReferenceLayer, inputs: Inputs, role: str) -> Any:
    """The rows of one role by the projection of another: `qkk` takes those of the keys for the
    values.
    """
    weight, row = in_role(role, weights), in_role(role, rows)
    return in_role(weight, layer.weights)(inputs.rows_of(row))


def by_changed(
    change: Callable[[Projection], Projection], layer: ReferenceLayer, inputs: Inputs, role: str
) -> Tensor:
    """Queries, keys or values by a changed projection."""
    return change(in_role(role, layer.weights))(inputs.rows_of(role))


def projected_out(
    change: Callable[[Projection], Projection], layer: ReferenceLayer, rows: Tensor
) -> Tensor:
    """The concatenated heads by a changed output projection."""
    out = None if layer.weights is None else layer.weights.out
    if out is None:
        raise NotPossible
    return change(out)(rows)


def unbiased(projection: Projection) -> Projection:
    """A projection without its bias."""
    return replace(projection, bias=None)


def transposed(projection: Projection) -> Projection:
    """A projection whose weight is applied transposed."""
    return replace(projection, weight=projection.weight.mT)


def projected_twice(giver: str, layer: ReferenceLayer, inputs: Inputs, role: str) -> Any:
    """Queries, keys or values that read another instead of rows."""
    return in_role(role, layer.weights)(stages.project(layer, inputs, giver))


def exchanged(givers: str, layer: ReferenceLayer, qkv: Sequence[Tensor], role: str) -> Any:
    """Heads in other roles."""
    require(len({heads.shape[1] for heads in qkv}) == 1)
    return in_role(in_role(role, givers), qkv)


def unchanged(layer: ReferenceLayer, heads: Tensor, *_: Any) -> Tensor:
    """Heads that are neither rotated nor normalised."""
    return heads


def other_pairing(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads rotated in the other pairing."""
    return rotated(
        layer, heads, start, pairing="interleaved" if layer.pairing == "half" else "half"
    )


def shifted(by: int, layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads rotated as if they stood some places further."""
    return rotated(layer, heads, start + by)


def by_head(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads rotated by their number."""
    return rotated(layer, heads.transpose(1, 2), 0).transpose(1, 2)


def at_rates(
    rates: Callable[[Tensor], Tensor], layer: ReferenceLayer, heads: Tensor, start: int, role: str
) -> Tensor:
    """Heads rotated by other angles, from the right ones."""
    right = stages.rates_of(layer, heads)
    require(layer.rates is None and len(right) > 1)
    return rotated(replace(layer, rates=rates(right)), heads, start)


def one_signed(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """Heads with the sine of the same sign in both columns of a pair."""
    column = torch.arange(heads.shape[-1], device=heads.device)
    is_first = column < heads.shape[-1] // 2 if layer.pairing == "half" else column % 2 == 0
    backwards, forwards = rotated(layer, heads, start, sign=-1), rotated(layer, heads, start)
    return torch.where(is_first, backwards, forwards)


# ---------------------------------------------------------------------------- decoding with a cache


_POSITIONS = r"(freqs|rope|rota|\bcos|\bsin|\bpos|_pos|offset|angle)"
_CACHES = r"(cache|past|prev|mem|kept|state|buf|\bkeys?\b|\bvalues?\b)"


def of_caches() -> Iterator[Mistake]:
    """The rows of a cache in another order, queries and keys at another position, and other masks
    of a step.
    """
    writing = (
        rf"(?i)cat\(.*{_CACHES}",
        rf"(?i){_CACHES}\w*\[.*\] =",
        rf"(?i){_CACHES}\w*\.\w+\(",
        rf"(?i){_CACHES}",
    )
    order = partial(Mistake, "cache-order", shown_by="steps", at=writing)
    new_first = {"join": lambda layer, cached, new, role: torch.cat([new, cached], dim=2)}
    for rows, letters in (("rows", "kv"), ("keys", "k"), ("values", "v")):
        yield order(new_first, f"new {rows} stand before the cached ones", letters=letters)
        over = f"the {rows} of every step are written over the first ones"
        yield order({"join": over_the_first}, over, letters=letters)
    kept = "only the rows of the step before are kept"
    yield order(
        {"cache": lambda layer, keys, values, n: (keys[:, :, -n:], values[:, :, -n:])}, kept
    )
    handed = "cached keys and values are exchanged whenever they are handed on"
    yield order({"cache": lambda layer, keys, values, n: (values, keys)}, handed)
    yield order(
        {"read": lambda layer, keys, values: (values, keys)},
        "keys are read as values, and values as keys",
    )

    from_0 = r"arange\((0, *)?[^,]*(\)|, *\w+=)"
    places = (from_0, rf"(?i){_POSITIONS}.*\[", rf"(?i){_POSITIONS}")
    position = partial(Mistake, "cache-position", shown_by="steps", at=places)
    restarted = {"rotate": lambda layer, heads, start, role: stages.rotate(layer, heads, 0, role)}
    for rows, letters in (("every step begins", "qk"), ("the keys of every step begin", "k")):
        yield position(restarted, f"{rows} at position 0", letters=letters)
    yield position(
        {"join": rotated_again}, "cached keys are rotated again in every step", letters="k"
    )
    shifted = {
        "rotate": lambda layer, heads, start, role: stages.rotate(
            layer, heads, start + (start > 0), role
        )
    }
    yield position(shifted, "a step stands one position too far to the right")

    masking = ("tril|triu", "masked_fill", r"where\(", "scaled_dot_product", "softmax")
    mask = partial(Mistake, "cache-mask", shown_by="steps", at=masking)
    top_left = "the first query of a step stands at the first key"
    yield mask({"causal_rule": from_top_left}, top_left)
    of_chunks = {
        "causal_rule": lambda layer, *sizes: (
            torch.ones(sizes).tril(0 if sizes[0] > 1 else sizes[1]) > 0
        )
    }
    yield mask(of_chunks, f"{top_left}, if it has several tokens")


def over_the_first(layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str) -> Tensor:
    """The new rows in place of the first cached ones, and empty ones at the end."""
    n_new = new.shape[2]
    return torch.cat([new, cached[:, :, n_new:], torch.zeros_like(cached[:, :, :n_new])], dim=2)


def rotated_again(layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str) -> Tensor:
    """The new keys behind the cached ones, which are rotated already and rotated once more."""
    return stages.join(layer, stages.rotate(layer, cached, 0, role), new, role)


MISTAKES: Sequence[Mistake] = [
    *of_heads(),
    *of_scores(),
    *of_masks(),
    *of_projections(),
    *of_caches(),
]
"""Every form of every mistake, in the order in which they are tried, the likelier first within a
stage."""
