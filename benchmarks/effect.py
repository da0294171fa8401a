"""Removing every head of a model of GPT-2-small's shape, beside a plain loop of hooked forward
passes.

    python benchmarks/effect.py [ROUNDS] [THREADS]

12 layers × 12 heads, random weights, a text of 128 tokens, float32, on the CPU with 2 threads, or
THREADS. Times are those that the processor worked, which other load moves little. The loop is what
people write by hand: for each head one pass of the whole text with a hook before the output
projection. `loop` makes the logits at the last token alone, `loop, all logits` at every one, as a
call of the model does by itself. They are measured on every twelfth head, and scaled to all.
`attribution patching` estimates the same effects to first order, by two forward passes and one
backward pass. The encoder is of the shape of BERT-base with its language head; its loop makes all
logits. Runs alternate; the ratios are medians of the ratios of each round. `with proof` is what
`mha effect` does: four removals are computed a second time.

Memory: the largest resident size of a fresh process that removes the heads at all positions, less
that of one that only loads the model, beside the same of one plain batch with as many rows.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from time import process_time
from typing import Any

import torch
from peak import peak_mib

import mhacli
from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import TOKENS_AT_ONCE, EffectStudy
from mhacli.record.record import Record
from mhacli.run import Run

N_LAYERS, N_HEADS, LENGTH, EVERY = 12, 12, 128, 12
HEADS = [(layer, head) for layer in range(N_LAYERS) for head in range(N_HEADS)]


def made() -> tuple[Any, torch.Tensor]:
    """A model with random weights, and a text."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval().requires_grad_(False)
    return model, torch.randint(0, 50257, (1, LENGTH))


def encoder() -> Any:
    """An encoder with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(max_position_embeddings=LENGTH)
    return transformers.BertForMaskedLM(config).eval().requires_grad_(False)


@cache
def inspected(model: Any, n_tokens: int) -> Record:
    """The record of a pass, which a study begins with."""
    with torch.no_grad(), mhacli.inspecting(model) as seen:
        model(input_ids=torch.zeros(1, n_tokens, dtype=torch.int64), use_cache=False)
    return seen.record


def effects(model: Any, ids: torch.Tensor, at: int | None, n_verified: int) -> Record:
    """All heads removed, at one position or everywhere."""
    settings = EffectSettings(at=at, position=LENGTH - 1, target=7, verify=n_verified)
    return EffectStudy(model, {"input_ids": ids}, settings, Run(), inspected(model, LENGTH)).run()


def projection_of(model: Any, layer: int) -> Any:
    """The output projection of a layer."""
    is_encoder = hasattr(model, "bert")
    return (
        model.bert.encoder.layer[layer].attention.output.dense
        if is_encoder
        else model.transformer.h[layer].attn.c_proj
    )


def attributed(model: Any, ids: torch.Tensor, at: int | None) -> list[float]:
    """The estimated changes of the target's logit by all heads: the gradient of z times what a
    removal takes from it, which is z less that of a pass without heads, whose z is zeros here.
    """
    z: list[torch.Tensor] = []

    def keep(_: Any, args: Any) -> Any:
        z.append(args[0].requires_grad_())
        return (z[-1],)

    handles = [
        projection_of(model, layer).register_forward_pre_hook(keep) for layer in range(N_LAYERS)
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    z.clear()
    logit = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1, 7]
    gradients = torch.autograd.grad(logit, z)
    for handle in handles:
        handle.remove()
    places = slice(None) if at is None else slice(at, at + 1)
    parts = [
        -(a * b)[0, places].detach().unflatten(-1, (N_HEADS, 64)).sum((0, 2))
        for a, b in zip(z, gradients, strict=True)
    ]
    return torch.cat(parts).tolist()


@torch.no_grad()
def loop(
    model: Any, ids: torch.Tensor, at: int | None, heads: Sequence[tuple[int, int]], **how: int
) -> list[float]:
    """The change of the target's logit by each head, one pass after the other."""

    def logit() -> float:
        return float(model(input_ids=ids, use_cache=False, **how).logits[0, -1, 7])

    plain, changes = logit(), []
    for layer, head in heads:
        places = slice(None) if at is None else slice(at, at + 1)

        def zero(_: Any, args: Any, head: int = head, places: slice = places) -> Any:
            z = args[0].clone()
            z[:, places, 64 * head : 64 * head + 64] = 0
            return (z,)

        handle = projection_of(model, layer).register_forward_pre_hook(zero)
        changes.append(logit() - plain)
        handle.remove()
    return changes


def seconds_of(run: Callable[[], object]) -> float:
    began = process_time()
    run()
    return process_time() - began


def compare(model: Any, ids: torch.Tensor, at: int | None, n_rounds: int) -> None:
    """Prints the medians and ratios of one kind of removal; the changes must agree."""
    chosen = HEADS[::EVERY]
    loops: dict[str, Callable[[], list[float]]] = {
        "loop, all logits": lambda: loop(model, ids, at, chosen)
    }
    is_decoder = hasattr(model, "transformer")
    if is_decoder:
        loops["loop"] = lambda: loop(model, ids, at, chosen, logits_to_keep=1)
    inspected(model, LENGTH)
    whole = (len(HEADS) + 1) / (len(chosen) + 1)  # each loop begins with a pass of the whole model
    found = effects(model, ids, at, 0).effects
    for run in loops.values():
        for item, change in zip(range(0, len(HEADS), EVERY), run(), strict=True):
            assert abs((found[item].d_logit or 0.0) - change) < 1e-4
    ways: dict[str, Callable[[], object]] = {
        "removals": lambda: effects(model, ids, at, 0),
        "with proof": lambda: effects(model, ids, at, 4),
        **loops,
    }
    if is_decoder:
        ways["attribution patching"] = lambda: attributed(model, ids, at)
    rounds = [{name: seconds_of(way) for name, way in ways.items()} for _ in range(n_rounds)]
    for row in rounds:
        for name in loops:
            row[name] *= whole
    where = (
        f"{'decoder' if is_decoder else 'encoder'},"
        f" {'all positions' if at is None else 'one position'}"
    )
    medians = ", ".join(
        f"{name} {statistics.median(row[name] for row in rounds):.2f} s" for name in ways
    )
    print(f"{where}: {medians}")
    for name in ("removals", "with proof"):
        ratios = (
            f"{statistics.median(row[slow] / row[name] for row in rounds):.1f} × the {slow}"
            for slow in loops
        )
        print(f"  {name}: {', '.join(ratios)}", flush=True)
    if is_decoder:
        ratio = statistics.median(row["removals"] / row["attribution patching"] for row in rounds)
        print(f"  removals: {ratio:.1f} × the time of attribution patching")


@torch.no_grad()
def peak(what: str) -> None:
    """Runs one of the ways, in a process whose memory is measured."""
    model, ids = made()
    if what == "effects":
        effects(model, ids, None, 4)
    elif what == "at":
        effects(model, ids, LENGTH - 1, 4)
    elif what == "batch":
        model(input_ids=ids.repeat(TOKENS_AT_ONCE // LENGTH, 1), use_cache=False)


def memory() -> None:
    """Prints what each way takes beyond the model."""
    taken = {}
    for what in ("model", "effects", "at", "batch"):
        taken[what] = peak_mib([sys.executable, __file__, "peak", what])
    beyond = {what: taken[what] - taken["model"] for what in ("effects", "at", "batch")}
    print(
        f"memory beyond the model: all positions {beyond['effects']:.0f} MiB, one position"
        f" {beyond['at']:.0f} MiB, a plain batch of {TOKENS_AT_ONCE // LENGTH} rows"
        f" {beyond['batch']:.0f} MiB"
    )


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]) if sys.argv[2:] and sys.argv[1] != "peak" else 2)
    if sys.argv[1:2] == ["peak"]:
        peak(sys.argv[2])
    else:
        given, text = made()
        n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
        for position in (LENGTH - 1, None):
            compare(given, text, position, n_rounds)
        compare(encoder(), text % 30_000, None, n_rounds)
        memory()
