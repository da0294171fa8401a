"""Mistakes that people make when they remove heads by hand: the proof that runs with every effect notices each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.model_families import FAMILIES, ids_of, loaded_of, made
from torch import Tensor

from mhacli.adapters.hf.capture import captured
from mhacli.compute.effect import run as effect_run
from mhacli.compute.effect.metric import Changes, changes
from mhacli.compute.effect.removal import Removal, Remover
from mhacli.compute.effect.run import EffectRun, Target

N, HEADS, KV_HEADS, WIDTH = 11, 4, 2, 12
HEAD = (Removal(("self", 1), (2,)),)
EDGE = (Removal(("self", 1), (2,), (N - 1,), tuple(range(N - 2)), "renormalise"),)
Mistake = Callable[[pytest.MonkeyPatch], None]


def run_of(name: str, *plan: tuple[Removal, ...]) -> EffectRun:
    family = FAMILIES[name]
    model = made(family.kind, family.choices, automatic="AutoModelForCausalLM")
    run = EffectRun(loaded_of(model), {"input_ids": ids_of(1, N)}, plan, N - 1, Target(5))
    run.run()
    return run


def hooked(patch: pytest.MonkeyPatch, edit: Callable[[Any, Tensor, int], Tensor], *, is_instead: bool) -> None:
    """What a row should lack is done to the output of the projection of GPT-2, in place of the removal or besides it."""

    @contextmanager
    def mistaken(model: Any, take: Any, *, batch: int) -> Iterator[None]:
        if not isinstance(take, Remover):
            with captured(model, take, batch=batch):
                yield
            return

        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            for row in range(1, batch - 1):
                output[row] = edit(module, output[row], 2)
            return output

        handle = model.transformer.h[1].attn.c_proj.register_forward_hook(hook)
        seen: Any = take
        if is_instead:
            take.n_removed, seen = batch - 2, lambda call: None
        with captured(model, seen, batch=batch):
            yield
        handle.remove()

    patch.setattr(effect_run, "captured", mistaken)


def after_the_projection(patch: pytest.MonkeyPatch) -> None:
    def zero(module: Any, output: Tensor, head: int) -> Tensor:
        output[:, WIDTH * head : WIDTH * head + WIDTH] = 0
        return output

    hooked(patch, zero, is_instead=True)


def the_bias_too(patch: pytest.MonkeyPatch) -> None:
    hooked(patch, lambda module, output, head: output - module.bias, is_instead=False)


def replacing(edit: Callable[[Tensor, int, int], None]) -> Mistake:
    """A mistake in what takes the place of z: of a row, and of a head."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def mistaken(remover: Remover, z: Tensor, removal: Removal, row: int) -> None:
            edit(z, row, removal.heads[0])

        patch.setattr(Remover, "_replace_heads", mistaken)

    return apply


def _zero(z: Tensor, row: Any, heads: Any) -> None:
    z[row, heads] = 0


def nothing_and_then_normalised(patch: pytest.MonkeyPatch) -> None:
    def stretched(*given: Any) -> Changes:
        found = changes(*given)
        assert found.d_logit is not None
        return found._replace(d_logit=found.d_logit / (found.d_logit.abs().max() + 1e-12))

    replacing(lambda z, row, head: None)(patch)
    patch.setattr(effect_run, "changes", stretched)


def not_renormalised(patch: pytest.MonkeyPatch) -> None:
    def kept(scores: Tensor, is_cut: Tensor, sinks: Tensor | None) -> Tensor:
        return scores.softmax(dim=-1).masked_fill(is_cut, 0.0)

    patch.setattr("mhacli.compute.effect.removal.softmax_without", kept)


def a_mask_that_the_kernel_never_sees(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Remover, "_cut_edges", lambda remover, z, call, removal, row: remover.seen.add(row))


def the_values_of_another_kv_head(patch: pytest.MonkeyPatch) -> None:
    cut = Remover._cut_edges

    def mistaken(remover: Remover, z: Tensor, call: Any, removal: Removal, row: int) -> None:
        object.__setattr__(call, "v", call.v.flip(1))
        cut(remover, z, call, removal, row)

    patch.setattr(Remover, "_cut_edges", mistaken)


MISTAKES: dict[str, tuple[str, tuple[Removal, ...], Mistake]] = {
    "after the output projection": ("gpt2", HEAD, after_the_projection),
    "the bias of the projection as well": ("gpt2", HEAD, the_bias_too),
    "all heads": ("llama", HEAD, replacing(lambda z, row, head: _zero(z, row, slice(None)))),
    "the neighbouring head": ("llama", HEAD, replacing(lambda z, row, head: _zero(z, row, head ^ 1))),
    "all heads of a kv head": (
        "llama",
        HEAD,
        replacing(lambda z, row, head: _zero(z, row, slice(head, head + HEADS // KV_HEADS))),
    ),
    "every text of the batch": ("llama", HEAD, replacing(lambda z, row, head: _zero(z, slice(None), head))),
    "nothing": ("llama", HEAD, replacing(lambda z, row, head: None)),
    "nothing, normalised": ("llama", HEAD, nothing_and_then_normalised),
    "an edge whose row does not grow": ("llama", EDGE, not_renormalised),
    "a mask that the kernel never sees": ("llama", EDGE, a_mask_that_the_kernel_never_sees),
    "the values of another kv head": ("llama", EDGE, the_values_of_another_kv_head),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_removal_is_not_verified(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, removals, mistake = MISTAKES[name]
    mistake(monkeypatch)
    verified = run_of(family, removals).verified
    assert verified is not None
    assert (verified.n, verified.ok) == (1, False)


@pytest.mark.parametrize(("family", "removals"), [("gpt2", HEAD), ("llama", HEAD), ("llama", EDGE)])
def test_the_same_without_a_mistake_is_verified(family: str, removals: tuple[Removal, ...]) -> None:
    verified = run_of(family, removals).verified
    assert verified is not None
    assert (verified.n, verified.ok) == (1, True)
