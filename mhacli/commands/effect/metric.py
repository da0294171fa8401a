"""The measured output of a pass: the last hidden state at one position, and the logits there if the model has a language head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.models.device_map import device_of
from mhacli.models.inputs import outputs_of


class Target(NamedTuple):
    """The measured token `id`; with `versus`, the measure is the difference of both logits."""

    id: int
    versus: int | None = None


class Reading(NamedTuple):
    """The hidden state before the language head, and the logits, of each row at one position. In float64."""

    hidden: Float[Tensor, "row d_model"]
    logits: Float[Tensor, "row token"] | None


class Changes(NamedTuple):
    """The changes of rows from one without removals. Those of logits are None without a language head."""

    d_output: Float[Tensor, " row"]
    d_logit: Float[Tensor, " row"] | None = None
    d_logprob: Float[Tensor, " row"] | None = None
    kl: Float[Tensor, " row"] | None = None
    rank: Float[Tensor, " row"] | None = None


def read_position(model: Any, keywords: Mapping[str, Tensor], position: int) -> Reading:
    """The output of one pass at a position. If the model can, it computes logits only there."""
    head = language_head(model)
    if head is None:
        outputs = outputs_of(model, keywords)
        return Reading(outputs["last_hidden_state"][:, position].double(), None)
    hidden: list[Tensor] = []
    given: dict[str, Any] = dict(keywords)
    if makes_single_logits(model):
        given["logits_to_keep"] = torch.tensor([position], device=device_of(model))
        position = 0
    handle = head.register_forward_pre_hook(lambda _, args: hidden.append(args[0][:, position].double()))
    try:
        outputs = outputs_of(model, given)
    finally:
        handle.remove()
    return Reading(hidden[-1], outputs["logits"][:, position].double())


def language_head(model: Any) -> nn.Module | None:
    """The module that computes logits, None for a model without."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def makes_single_logits(model: Any) -> bool:
    """Whether a model can compute the logits of a single position."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def changes(rows: Reading, untouched: Reading, target: Target | None) -> Changes:
    """The changes of rows from one without removals."""
    d_output = (rows.hidden - untouched.hidden).norm(dim=-1) / untouched.hidden.norm(dim=-1)
    if rows.logits is None or untouched.logits is None or target is None:
        return Changes(d_output)
    log_p, before = rows.logits.log_softmax(dim=-1), untouched.logits.log_softmax(dim=-1)
    return Changes(
        d_output,
        d_logit=compared(rows.logits, target) - compared(untouched.logits, target),
        d_logprob=log_p[:, target.id] - before[:, target.id],
        kl=(before.exp() * (before - log_p)).sum(dim=-1),
        rank=rank_of(rows.logits, target.id),
    )


def compared(logits: Float[Tensor, "row token"], target: Target) -> Float[Tensor, " row"]:
    """The logit of the target, minus that of `versus` if there is one."""
    return logits[:, target.id] - (0.0 if target.versus is None else logits[:, target.versus])


def rank_of(logits: Float[Tensor, "row token"], target: int) -> Float[Tensor, " row"]:
    """The number of tokens that are likelier than the target."""
    return (logits > logits[:, target, None]).sum(dim=-1)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal numbers have the mean of their ranks. None if one side has only one rank.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    ranks = torch.stack([_ranks(torch.tensor(numbers, dtype=torch.float64)) for numbers in (a, b)])
    ranks = ranks - ranks.mean(dim=1, keepdim=True)
    lengths = ranks.norm(dim=1)
    return None if not bool(lengths.all()) else round(float(ranks[0] @ ranks[1] / lengths.prod()), 12)


def _ranks(numbers: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    _, place, counts = numbers.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(dim=0) - (counts - 1) / 2
    return ranks[place]
