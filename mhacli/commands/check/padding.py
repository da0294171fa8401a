"""The behaviours of texts in a padded batch: whether each gives the same outputs as alone, and
whether what stands in the places of padding matters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.settings import PaddingSide
from mhacli.usercode.axes import at_sizes
from mhacli.usercode.masks import MaskForm

from .observed import Answers, Intent, Observed, compared, not_tried, seen
from .passes import PassDifference, Passes, difference_of, is_family, largest_of
from .result import Tried

_SHORT = 64
"""The most tokens of a text of a model of transformers whose padding is filled anew."""
_NO_MASK = "it takes no mask of padding by a known name"


def padding(side: PaddingSide, passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether texts padded on a side give the same outputs as each alone, with a mask of the real
    tokens, or with the id of padding where the model makes its mask from its ids. Padding on the
    left must change nothing where positions are given, in causal models of transformers, and where
    one padding token does what many do: positions would tell them apart.
    """
    model = passes.model
    lengths = [len(text) for text in passes.texts]
    mask = model.mask
    own = model.own_padding
    if mask is None and not model.is_stated and own.source_pad is None:
        return not_tried(passes, _NO_MASK)
    if side not in model.sides:
        kind = "an encoder-decoder model" if model.has_source else "lengths"
        return not_tried(passes, f"{kind}, for texts that are padded on the right")
    if min(lengths) == max(lengths):
        return not_tried(passes, "needs texts of different lengths")
    return _by_ids(passes, side) if mask is None else _by_mask(passes, intent, side)


def _by_mask(passes: Passes, intent: Intent, side: PaddingSide) -> Observed:
    """Whether padding that a mask marks changes no output."""
    model = passes.model
    lengths = [len(text) for text in passes.texts]
    tried = [(_padded(passes, form, side), form) for form in model.masks]
    differences, mask = min(tried, key=lambda each: largest_of(each[0]))
    if reason := _read_at_another_end(passes, differences, mask, side):
        return seen(passes, None, reason, max(each.whole for each in differences))
    is_claimed = intent.is_causal is True and is_family(model)
    knows_start = side == "right" or model.positions is not None or is_claimed
    by = "" if knows_start else ", as where positions count from the first token of a batch"
    if not knows_start and _is_of_no_position(passes, differences, mask):
        by = ", however many they are"
        knows_start = True
    n_padding = max(lengths) - min(lengths)
    subject = f"with up to {n_padding} padding tokens on the {side}, a text gives"
    meaning = "" if mask.kind == "lengths" else f", {mask.as_passed}"
    agrees = f"{subject} the same outputs as alone ({mask.parameter}{meaning})"
    differs = f"{subject} other outputs than alone{by}"
    observed = compared(passes, differences, agrees, differs)
    if observed.ok is False and _hides_real_tokens(passes, mask, side):
        reason = (
            f"{mask.parameter} hides the tokens that it marks with 1, which every tokenizer marks"
            " as real ones"
        )
        return replace(observed, reason=reason)
    return observed if knows_start and model.hides_padding else observed.as_note()


def _is_of_no_position(
    passes: Passes, differences: Sequence[PassDifference], mask: MaskForm | None
) -> bool:
    """Whether tokens that padding on the left changes are the same behind one padding token and
    behind many, which positions would tell apart.
    """
    text = min(passes.texts, key=len)
    beside = (passes.text[: len(text) + 1], passes.text)
    is_changed = max(each.by_token.max().item() for each in differences) > passes.tolerance
    is_told = is_changed and len(beside[0]) < passes.length and not passes.attention.is_pooled
    if not is_told or passes.too_coarse:
        return False
    one, many = (passes.run_pass(each, text, mask=mask, side="left")[1] for each in beside)
    return difference_of(one, many).by_token.max().item() <= passes.tolerance


def _hides_real_tokens(passes: Passes, mask: MaskForm, side: PaddingSide) -> bool:
    """Whether a text is the same as alone if the mask of its tokens is turned over."""
    turned = mask._replace(true_means="hide")
    return turned.is_turned and largest_of(_padded(passes, turned, side)) <= passes.tolerance


def _read_at_another_end(
    passes: Passes, differences: Sequence[PassDifference], mask: MaskForm, side: PaddingSide
) -> str:
    """Why the answer for a whole text differs, though those of its tokens do not and padding on the
    other side changes nothing; empty where that is not so.
    """
    tokens = max(each.by_token.max().item() for each in differences)
    whole = max(each.whole for each in differences)
    if mask.kind == "lengths" or not tokens <= passes.tolerance < whole:
        return ""
    other: PaddingSide = "left" if side == "right" else "right"
    if max(each.whole for each in _padded(passes, mask, other)) > passes.tolerance:
        return ""
    end = "last" if side == "right" else "first"
    return f"the answer for a text is read at its {end} token: pad texts on the {other}"


def _padded(passes: Passes, mask: MaskForm | None, side: PaddingSide) -> list[PassDifference]:
    """The texts padded on a side, each against the text alone."""
    padded = passes.run_pass(*passes.texts, mask=mask, side=side)
    return [*map(difference_of, padded, passes.single_passes)]


# ----------------------------------------------------------------------------- a mask from the ids


def _by_ids(passes: Passes, side: PaddingSide) -> Observed:
    """Whether padding that only its id marks changes no output. It is a fault of a model that
    compares its ids with this one; on the left unless positions may count from the first token of a
    batch.
    """
    own = passes.model.own_padding
    pads = [pad for pad in own if pad is not None]
    differences = _padded(passes, None, side)
    is_compared = own.pad is not None
    if own.source_pad is not None:
        of_source = _beside_padded_source(passes, own.source_pad)
        is_compared = is_compared or of_source.largest > passes.tolerance
        differences.append(of_source)
    known = "which its code looks for" if pads else "of its padding"
    ids = " and ".join(map(str, dict.fromkeys(pads or [passes.model.pad])))
    subject = f"padded on the {side} with the id {ids}, {known}, a text gives"
    observed = compared(
        passes,
        differences,
        f"{subject} the same outputs as alone",
        f"{subject} other outputs than alone",
    )
    if is_compared and (side == "right" or _is_of_no_position(passes, differences, None)):
        return observed
    return observed.as_note()


def _beside_padded_source(passes: Passes, pad: int) -> PassDifference:
    """The text beside half of its source, with padding behind that and without."""
    attention = passes.attention
    source = passes.model.source
    assert source is not None
    dim = attention.axes.index("row")
    whole: Tensor = at_sizes(attention.others[source], attention.sizes._replace(batch=1))
    half, rest = whole.tensor_split([whole.shape[dim] // 2], dim)
    padded = torch.cat([half, torch.full_like(rest, pad)], dim)
    (ours,), (theirs,) = (
        passes.run_pass(passes.text, given={source: ids}) for ids in (padded, half)
    )
    return difference_of(ours, theirs)


# ------------------------------------------------------------------------- the content of padding


def content(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether under the same mask other content in the places of padding changes an output of a
    real token, on either side: other ids or vectors, or, where an id is that of padding, another
    vector of it, because positions or answers may be found by this id.
    """
    model = passes.model
    if model.mask is None:
        return not_tried(passes, _NO_MASK)
    most = _SHORT if is_family(model) else passes.length
    texts = [passes.text[:most], passes.texts[-1][: max(1, most // 4)]]
    if len(texts[0]) == len(texts[1]) or not model.attention.is_resizable:
        return not_tried(passes, "needs texts of different lengths")

    def refilled(form: MaskForm) -> list[PassDifference]:
        differences = list[PassDifference]()
        for side in model.sides:
            moved = _refilled(passes, texts, mask=form, side=side)
            if not answers[f"{side}-padding"].ok:  # it may be read where padding stands
                moved = [each._replace(whole=0.0) for each in moved]
            differences += moved
        return differences

    differences = min(map(refilled, model.masks), key=largest_of)
    subject = f"what stands in places that {model.mask.parameter} marks as padding changes"
    observed = compared(passes, differences, f"{subject} no output", f"{subject} outputs")
    observed = replace(observed, tried=Tried(len(texts[0]), len(differences)))
    table = model.table
    row = getattr(model.table, "padding_idx", None)
    # torch keeps the vector of padding 0, so that nothing else can stand there
    stays_zero = table is not None and row is not None and not table.weight[row].any()
    return observed.as_note() if stays_zero or not model.hides_padding else observed


def _refilled(passes: Passes, texts: Sequence[Tensor], **how: Any) -> list[PassDifference]:
    """Padded texts, each against the same with other content in the places of padding, without the
    logits of its id.
    """
    model = passes.model
    # what an encoder reads may have the id too
    if model.table is None or not model.is_stated or model.has_source:
        fillings = (model.draw(passes.seed + seed, len(texts[0])) for seed in (2, 3))
        before, after = (passes.run_pass(*texts, filled_by=each, **how) for each in fillings)
        return [*map(difference_of, after, before)]
    within = partial(_row_drawn, model.table, model.pad, passes.seed)
    before = passes.run_pass(*texts, **how)
    after = passes.run_pass(*texts, within=within, **how)
    if before[0].output.shape[-1] == model.n_ids:
        kept = torch.arange(model.n_ids) != model.pad
        before, after = (
            [each._replace(output=each.output[:, kept]) for each in outputs]
            for outputs in (before, after)
        )
    return [*map(difference_of, after, before)]


@contextmanager
def _row_drawn(table: nn.Embedding, row: int, seed: int) -> Iterator[None]:
    """A context in which a row of a table has other numbers."""
    kept = table.weight[row].detach().clone()
    generator = torch.Generator().manual_seed(seed)
    drawn = table.weight.detach().std() * torch.randn(kept.shape, generator=generator).to(kept)
    try:
        with torch.no_grad():
            table.weight[row] = drawn
        yield
    finally:
        with torch.no_grad():
            table.weight[row] = kept
