"""The forms in which a call may take a mask, and a mask in each of them."""

from collections.abc import Iterable
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .axes import PATTERN_AXES, AxisNames, CallSizes, MadeForSizes, rearranged
from .roles import CallParameter

MaskKind = Literal["bool", "01", "whole", "additive", "lengths"]
MaskMeaning = Literal["keep", "hide"]


class MaskForm(NamedTuple):
    """The format of a mask argument.

    `axes` are words of `batch head query key`, in order; ("batch", "key") is a padding mask,
    ("batch",) lengths. `kind`: bool; 01, numbers in the module's dtype; whole, integers 0 and 1;
    additive, 0 and −∞ in the module's dtype; lengths, the number of tokens of each sequence.
    `true_means` is the meaning of True or 1, always keep for additive masks and lengths.
    `n_shared`: the batch axis of the mask is shorter by this factor and repeats, as the masks of
    windows repeat for each image. `is_padding`: it takes only which tokens are real; `hides`: texts
    that differ in a hidden key have the same outputs.
    """

    parameter: str
    axes: tuple[str, ...]
    kind: MaskKind
    true_means: MaskMeaning = "keep"
    n_shared: int = 1
    is_padding: bool = False
    hides: bool = False

    @property
    def described(self) -> str:
        """The form in words, with the meaning of True."""
        return f"{self.parameter} [{', '.join(self.axes)}] as {self.kind} ({self.true_means})"

    @property
    def as_passed(self) -> str:
        """What the cells of the mask are, and mean."""
        if self.kind == "additive":
            return "as 0 and −∞"
        if self.kind == "lengths":
            return "as lengths"
        mark = "True" if self.kind == "bool" else "1"
        return f"{mark} = {'may attend' if self.true_means == 'keep' else 'hidden'}"

    @property
    def is_turned(self) -> bool:
        """Whether 1 hides in the `attention_mask` of tokens, in which every tokenizer marks the
        real ones.
        """
        is_of_tokens = self.axes == ("batch", "key") and self.parameter == "attention_mask"
        return is_of_tokens and self.true_means == "hide"

    def repeated(self, allowed: Tensor) -> Tensor:
        """Of masks `[batch, 1, query, key]` those that a call can be given, as its texts share
        them.
        """
        n_masks = len(allowed) // self.n_shared if "batch" in self.axes else 1
        return allowed[:n_masks].repeat(self.n_shared, 1, 1, 1)


_MASKS: tuple[tuple[AxisNames, bool], ...] = (
    (PATTERN_AXES, False),
    (("batch", "query", "key"), False),
    (("query", "key"), False),
    (("query", "key", "batch"), False),
    (("batch", "key"), True),
    (PATTERN_AXES, True),
    (("batch", "query", "key"), True),
)
"""The axes of a mask, and whether it is of padding, the likeliest first."""
MARKS: tuple[MaskKind, ...] = ("bool", "01", "whole")
"""The kinds in which True or 1 marks a key."""
_KINDS: tuple[tuple[MaskKind, MaskMeaning], ...] = (
    *product(MARKS, get_args(MaskMeaning)),
    ("additive", "keep"),
)


def forms_of(parameter: CallParameter) -> list[MaskForm]:
    """The forms in which a mask, and then padding, may be given, the likeliest first."""
    name = parameter.name
    role = parameter.role
    default = parameter.default
    if role == "lengths":
        return [MaskForm(name, ("batch",), "lengths", is_padding=True)]
    return [
        MaskForm(name, axes, kind, meaning, is_padding=is_padding)
        for (axes, is_padding), (kind, meaning) in product(_MASKS, _KINDS)
        if (is_padding or role in ("mask", "bias"))
        and (kind == "additive" or role != "bias")
        and (not isinstance(default, Tensor) or default.ndim == len(axes))
    ]


def as_tokenizers_mean(forms: Iterable[MaskForm], *, of_ids: bool = False) -> list[MaskForm]:
    """The accepted forms of an argument; of an `attention_mask` of tokens that hides those which it
    marks with 1, the same form with the meaning that tokenizers give it. Beside ids it is that of a
    tokenizer, of whole numbers, if it takes these.
    """
    every = [*forms]
    turned = [form for form in every if form.is_turned and form.hides]
    plain = [form for form in every if form._replace(true_means="hide").is_turned]
    whole = [form for form in plain if form.kind == "whole" and form.true_means == "keep"]
    if of_ids and whole and not turned:
        return whole
    if turned:
        return [turned[0]._replace(true_means="keep", hides=False)]
    return [form for form in every if not form.is_turned]


def mask_in(
    form: MaskForm, allowed: Tensor | None, real: Tensor | None, sizes: CallSizes
) -> Tensor:
    """The mask in the given form, from `allowed`, bool `[batch or 1, 1, query, key]`, `real`, bool
    `[batch, key]`, or both; True = keep.

    The batch axis has full size; other axes have size 1 if the mask is constant along them, as it
    is along those that the form lacks. Lengths are of padding on the right.
    """
    if form.kind == "lengths":
        return torch.full((sizes.batch,), sizes.k_len) if real is None else real.sum(-1)
    keep = torch.ones((), dtype=torch.bool) if allowed is None else allowed
    if real is not None:
        keep = keep.to(real.device) & real[:, None, None, :]
    for dim, axis in enumerate(PATTERN_AXES):
        if axis not in form.axes and keep.shape[dim] > 1:
            keep = keep.narrow(dim, 0, 1)
    if "batch" in form.axes:
        keep = keep.expand(sizes.batch, -1, -1, -1)[: sizes.batch // form.n_shared]
    keep = rearranged(keep, PATTERN_AXES, form.axes)
    if form.kind == "additive":
        return torch.zeros(keep.shape, dtype=torch.float64, device=keep.device).masked_fill(
            ~keep, -torch.inf
        )
    marked = keep if form.true_means == "keep" else ~keep
    return marked.to({"01": torch.float64, "whole": torch.int64}.get(form.kind, torch.bool))


def made_mask(form: MaskForm, *, causal: bool = False) -> MadeForSizes:
    """The mask of a call that hides later queries from each other, or nothing."""

    def make(sizes: CallSizes) -> Tensor:
        k_len = sizes.q_len if causal else sizes.k_len
        allowed = torch.ones(1, 1, sizes.q_len, k_len, dtype=torch.bool)
        return mask_in(form, allowed.tril() if causal else allowed, None, sizes)

    return MadeForSizes(make, hides_nothing=not causal)
