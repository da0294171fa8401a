"""Removals by hand in models of transformers: heads where an output projection reads them, edges by
the mask of one layer.

What changes is computed in numpy from the logits and the last hidden state. It shares no code with
mhacli.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.checkpoints import FAMILIES, N_HEADS

PROJECTIONS: Mapping[tuple[str, str], str] = {
    ("gpt2", "self"): "transformer.h.{}.attn.c_proj",
    ("llama", "self"): "model.layers.{}.self_attn.o_proj",
    ("mistral", "self"): "model.layers.{}.self_attn.o_proj",
    ("qwen3", "self"): "model.layers.{}.self_attn.o_proj",
    ("gemma2", "self"): "model.layers.{}.self_attn.o_proj",
    ("gemma3_text", "self"): "model.layers.{}.self_attn.o_proj",
    ("gpt_oss", "self"): "model.layers.{}.self_attn.o_proj",
    ("mixtral", "self"): "model.layers.{}.self_attn.o_proj",
    ("gpt_neox", "self"): "gpt_neox.layers.{}.attention.dense",
    ("bloom", "self"): "transformer.h.{}.self_attention.dense",
    ("falcon", "self"): "transformer.h.{}.self_attention.dense",
    ("falcon-alibi", "self"): "transformer.h.{}.self_attention.dense",
    ("bert", "self"): "bert.encoder.layer.{}.attention.output.dense",
    ("albert", "self"): "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
    ("t5", "encoder"): "encoder.block.{}.layer.0.SelfAttention.o",
    ("t5", "decoder"): "decoder.block.{}.layer.0.SelfAttention.o",
    ("t5", "cross"): "decoder.block.{}.layer.1.EncDecAttention.o",
    ("bart", "encoder"): "model.encoder.layers.{}.self_attn.out_proj",
    ("bart", "decoder"): "model.decoder.layers.{}.self_attn.out_proj",
    ("bart", "cross"): "model.decoder.layers.{}.encoder_attn.out_proj",
}
"""The output projection of a layer, by the family's own names. That of ALBERT is shared by its
layers, in their order."""


@dataclass(frozen=True)
class Removal:
    """Heads of a layer whose output is replaced, at one position or everywhere; or, with `queries`,
    edges of these heads.
    """

    kind: str
    layer: int
    heads: Sequence[int]
    queries: Sequence[int] = ()
    keys: Sequence[int] = ()
    mean: bool = False
    at: int | None = None


def described(effect: Mapping[str, Any], spans: Mapping[str, Sequence[int]] = {}) -> list[Removal]:
    """The removals that a row of `effects` in JSON names. `spans` are the positions of the
    spans.
    """
    kind, mean, at = effect["kind"], effect["replace"] == "mean", effect["at"]
    if effect["removed"] == "heads":
        kinds = effect.get("kinds") or [kind] * len(effect["heads"])
        return [
            Removal(k, layer, [head], mean=mean, at=at)
            for k, (layer, head) in zip(kinds, effect["heads"], strict=True)
        ]
    if effect["removed"] == "spans":
        keys, queries = (spans[name] for name in effect["spans"])
        return [Removal(kind, layer, range(N_HEADS), queries, keys) for layer in effect["layers"]]
    heads = range(N_HEADS) if effect["head"] is None else [effect["head"]]
    if effect["removed"] == "edge":
        return [Removal(kind, effect["layer"], heads, [effect["query"]], [effect["key"]])]
    return [Removal(kind, effect["layer"], heads, mean=mean, at=at)]


@contextmanager
def edited(
    family: str, model: Any, removals: Sequence[Removal], means: Mapping[str, Tensor]
) -> Iterator[None]:
    """The model without these parts. `means` are those of what each projection reads in the
    untouched model.
    """
    with ExitStack() as stack:
        for removal in removals:
            name = PROJECTIONS[family, removal.kind].format(removal.layer)
            projection = model.get_submodule(name)
            if removal.keys:
                module = model.get_submodule(name.rpartition(".")[0].replace(".output", ".self"))
                hook = module.register_forward_pre_hook(_masking(family, removal), with_kwargs=True)
            else:
                shared_before = (
                    removal.layer if "{}" not in PROJECTIONS[family, removal.kind] else 0
                )
                hook = projection.register_forward_pre_hook(
                    _replacing(removal, means.get(name), shared_before)
                )
            stack.callback(hook.remove)
        yield


def _replacing(removal: Removal, mean: Tensor | None, n_calls_before: int) -> Any:
    """A hook that replaces the columns of heads in what a projection reads."""
    n_calls = 0

    def replace(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        nonlocal n_calls
        n_calls += 1
        if n_calls - 1 != n_calls_before:
            return None
        x = args[0].clone()
        width = x.shape[-1] // N_HEADS
        places = slice(None) if removal.at is None else [removal.at]
        for head in removal.heads:
            columns = slice(head * width, (head + 1) * width)
            x[:, places, columns] = 0.0 if mean is None else mean[..., columns]
        return (x, *args[1:])

    return replace


def _masking(family: str, removal: Removal) -> Any:
    """A hook that gives a layer a mask of its own: that of the family, without the edges."""

    def mask(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x = args[0] if args else kwargs["hidden_states"]
        keys = kwargs.get("key_value_states")
        n_queries, n_keys = x.shape[1], (x if keys is None else keys).shape[1]
        allowed = torch.ones(N_HEADS, n_queries, n_keys, dtype=torch.bool)
        if removal.kind == "decoder" or (removal.kind == "self" and FAMILIES[family].causal):
            window = FAMILIES[family].windows[removal.layer]
            allowed &= torch.ones(n_queries, n_keys).tril().bool()
            if window is not None:
                allowed &= torch.ones(n_queries, n_keys).triu(1 - window).bool()
        allowed[np.ix_(removal.heads, removal.queries, removal.keys)] = False
        added = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, -torch.inf)[None]
        return args[:1], {**kwargs, "mask" if family == "t5" else "attention_mask": added}

    return mask


def means_of(
    family: str, model: Any, inputs: Mapping[str, Tensor], removals: Sequence[Removal]
) -> dict[str, Tensor]:
    """The mean over the text of what the projections of means read, `[batch, 1, columns]`."""
    means: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for removal in (removal for removal in removals if removal.mean):
            name = PROJECTIONS[family, removal.kind].format(removal.layer)

            def read(_: Any, args: tuple[Tensor, ...], name: str = name) -> None:
                means[name] = args[0].mean(dim=1, keepdim=True)

            stack.callback(model.get_submodule(name).register_forward_pre_hook(read).remove)
        if any(removal.mean for removal in removals):
            model(**inputs, use_cache=False)
    return means


@dataclass(frozen=True)
class Output:
    """The logits at one position, and what the language head reads there."""

    logits: np.ndarray
    hidden: np.ndarray


@torch.no_grad()
def output(
    family: str,
    model: Any,
    inputs: Mapping[str, Tensor],
    position: int,
    removals: Sequence[Removal] = (),
) -> Output:
    """What the model gives at a position without some of its parts."""
    read: list[Tensor] = []
    with edited(family, model, removals, means_of(family, model, inputs, removals)):
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: read.append(args[0])
        )
        logits = model(**inputs, use_cache=False).logits
        hook.remove()
    return Output(*(tensor[0, position].double().numpy() for tensor in (logits, read[0])))


def changes(
    before: Output, after: Output, target: int, versus: int | None = None
) -> dict[str, float]:
    """Every measure of an effect, by its name in JSON."""
    p, q = (np.exp(one.logits - one.logits.max()) for one in (before, after))
    p, q = p / p.sum(), q / q.sum()
    logit = after.logits - before.logits
    return {
        "d_logit": logit[target] - (0.0 if versus is None else logit[versus]),
        "d_logprob": np.log(q[target]) - np.log(p[target]),
        "kl": float((p * np.log(p / q)).sum()),
        "rank": int((after.logits > after.logits[target]).sum()),
        "d_output": float(
            np.linalg.norm(after.hidden - before.hidden) / np.linalg.norm(before.hidden)
        ),
    }
