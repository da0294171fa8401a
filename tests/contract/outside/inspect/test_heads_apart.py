"""Attention with a module for each head: its heads are those of one layer, in the order in which
they run, as if one module computed all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mhacli

pytestmark = pytest.mark.real
IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
PAIR = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
WIDTH, N_HEADS, N_LAYERS = 16, 4, 2


class Projections(nn.Module):
    """The queries, keys and values of some heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, width) for _ in range(3))


class Head(Projections):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).mT * self.key.out_features**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if memory is x:
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ self.value(memory)


class AttentionHead(Head):
    pass


class FusedHead(Projections):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            self.query(x), self.key(memory), self.value(memory), is_causal=memory is x
        )


class SharedHead(nn.Module):
    """A head with keys and values that others have too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.query(x), k, v, is_causal=True)


class Listed(nn.Module):
    def __init__(self, head: type[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head(WIDTH // N_HEADS) for _ in range(N_HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x, memory) for head in self.heads], -1))


class InDict(Listed):
    def __init__(self, head: type[nn.Module]) -> None:
        super().__init__(head)
        named = {f"head_{i}": module for i, module in enumerate(self.heads)}
        self.heads = nn.ModuleDict(named)  # type: ignore[assignment]

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        heads = self.heads.values()  # type: ignore[operator]
        return self.proj(torch.cat([head(x, memory) for head in heads], -1))


class Group(nn.Module):
    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.cat([head(x, memory) for head in self.heads], -1)


class InGroups(Listed):
    def __init__(self, head: type[nn.Module]) -> None:
        super().__init__(head)
        self.heads = nn.ModuleList(Group(self.heads[i : i + 2]) for i in (0, 2))


class Summed(Listed):
    """Each head has an output projection of its own."""

    def __init__(self, head: type[nn.Module]) -> None:
        super().__init__(head)
        self.out = nn.ModuleList(nn.Linear(WIDTH // N_HEADS, WIDTH) for _ in range(N_HEADS))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        parts = [out(head(x, memory)) for head, out in zip(self.heads, self.out, strict=True)]
        return torch.stack(parts).sum(0)


class SharedKeys(Listed):
    def __init__(self, head: type[nn.Module]) -> None:
        super().__init__(head)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // N_HEADS) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.key(memory), self.value(memory)
        return self.proj(torch.cat([head(x, k, v) for head in self.heads], -1))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn, self.norm = attention, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attn(normed, normed)


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.Sequential(*(Block(make()) for _ in range(N_LAYERS)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.blocks(self.embed(ids)))


def model(make: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    made: Model = Model(make).eval()
    return made


FORMS: dict[str, Callable[[], nn.Module]] = {
    "list": lambda: Listed(Head),
    "named like attention": lambda: Listed(AttentionHead),
    "torch's function": lambda: Listed(FusedHead),
    "dict": lambda: InDict(Head),
    "named, in a dict": lambda: InDict(AttentionHead),
    "groups": lambda: InGroups(AttentionHead),
    "output of each head": lambda: Summed(Head),
    "shared keys and values": lambda: SharedKeys(SharedHead),
}
FORM = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


def logit(output: Tensor) -> Tensor:
    return output[0, -1, 3]


def heads_of(module: nn.Module) -> list[nn.Module]:
    """The modules of heads, in order."""
    return [part for part in module.modules() if isinstance(part, Projections | SharedHead)]


@torch.no_grad()
def changes_by_hand(module: Model) -> dict[tuple[int, int], float]:
    """What changes where a module of a head gives zeros."""
    before, changes = logit(module(IDS)), dict[tuple[int, int], float]()
    for number, head in enumerate(heads_of(module)):
        hook = head.register_forward_hook(lambda _module, _inputs, output: output * 0)
        changes[divmod(number, N_HEADS)] = float(logit(module(IDS)) - before)
        hook.remove()
    return changes


@FORM
def test_effects_measure_every_head_as_by_hand(make: Callable[[], nn.Module]) -> None:
    module = model(make)
    record = mhacli.effects(module, IDS, metric=logit)
    measured = {(each.layer, each.head): each.d_logit for each in record.effects}
    assert measured == pytest.approx(changes_by_hand(module), abs=1e-5)


@FORM
def test_what_removes_a_head_removes_the_one_with_its_number(
    make: Callable[[], nn.Module],
) -> None:
    module = model(make)
    for head, change in changes_by_hand(module).items():
        with torch.no_grad():
            before = logit(module(IDS))
            with mhacli.removed(module, heads=[head]):
                assert float(logit(module(IDS)) - before) == pytest.approx(change, abs=1e-5)


def weights_of(head: nn.Module, x: Tensor, memory: Tensor, *_: Tensor) -> Tensor:
    """The weights of a head, by its formula."""
    keys = memory if isinstance(head, SharedHead) else head.get_submodule("key")(memory)
    scores = head.get_submodule("query")(x) @ keys.mT * keys.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


@FORM
def test_the_record_has_the_heads_of_a_layer_in_order(make: Callable[[], nn.Module]) -> None:
    module, read = model(make), list[tuple[Tensor, ...]]()
    for head in heads_of(module):
        head.register_forward_hook(lambda _module, args, _output: read.append(args))
    with torch.no_grad(), mhacli.inspecting(module, keep=("pattern",)) as seen:
        module(PAIR)
    record = seen.record
    assert [(layer.layer, layer.n_heads) for layer in record.layers] == [(0, 4), (1, 4)]
    assert record.self_check.ok
    for number, (module_of_head, args) in enumerate(zip(heads_of(module), read, strict=True)):
        (layer, head), weights = divmod(number, N_HEADS), weights_of(module_of_head, *args)
        for text in range(2):
            shown = record.pattern(layer=layer, head=head, batch=text)
            assert np.allclose(shown, weights[text].detach(), atol=1e-6)


class Whole(nn.Module):
    """The attention of heads in a list, computed at once."""

    def __init__(self, listed: Listed) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in NAMES})
        for name, part in self.parts.items():
            heads = [head.get_submodule(name) for head in listed.heads]
            for of_all in ("weight", "bias"):
                stacked = torch.cat([getattr(head, of_all) for head in heads])
                getattr(part, of_all).data = stacked
        self.proj = listed.proj

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        read = dict(zip(NAMES, (x, memory, memory), strict=True))
        q, k, v = (
            self.parts[name](tokens).unflatten(-1, (N_HEADS, -1)).transpose(1, 2)
            for name, tokens in read.items()
        )
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=memory is x)
        return self.proj(z.transpose(1, 2).flatten(2))


NAMES = ("query", "key", "value")


def whole_model() -> Model:
    """The model of `Listed`, whose attentions compute all heads at once."""
    made = model(FORMS["list"])
    for block in made.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.attn, Listed)
        block.attn = Whole(block.attn)
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"replace": "mean"},
    "one position": {"at": 3},
    "two heads together": {"heads": [(0, 3), (1, 2)]},
    "edges": {"edges": True},
    "edges of a head": {"edges": True, "heads": [(1, 2)]},
    "estimates": {"screen": 2, "metric": logit},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_effects_are_those_of_heads_that_are_computed_at_once(options: dict[str, Any]) -> None:
    of_both = [
        {
            (each.layer, each.head, each.key): each.d_output
            for each in mhacli.effects(module, IDS, **options).effects
        }
        for module in (model(FORMS["list"]), whole_model())
    ]
    assert of_both[0] == pytest.approx(of_both[1], abs=1e-5)


REMOVALS: dict[str, dict[str, Any]] = {
    "zero": {"heads": [(0, 3), (1, 2)]},
    "mean": {"heads": [(0, 3)], "replace": "mean"},
    "edges": {"edges": [(0, 2, 3, 1), (1, None, 2, 0)]},
}


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS)
def test_within_a_removal_the_record_shows_what_was_used(removal: dict[str, Any]) -> None:
    outputs, patterns = list[Tensor](), list[Any]()
    for module in (model(FORMS["list"]), whole_model()):
        inspecting = mhacli.inspecting(module, keep=("pattern",))
        with torch.no_grad(), mhacli.removed(module, **removal), inspecting as seen:
            outputs.append(module(PAIR))
        assert seen.record.self_check.ok
        patterns.append(seen.record.pattern())
    assert torch.allclose(*outputs, atol=1e-6)
    assert np.allclose(*patterns, atol=1e-6)


@pytest.mark.parametrize("removal", [{"heads": [(0, 9)]}, {"edges": [(0, 9, 1, 1)]}])
def test_a_head_that_no_module_computes_is_refused(removal: dict[str, Any]) -> None:
    module = model(FORMS["list"])
    refused = pytest.raises(mhacli.MhaError, match="head 9 of layer 0")
    with refused, torch.no_grad(), mhacli.removed(module, **removal):
        module(IDS)


class Decoder(Block):
    """Attention to itself and to another text, both with a module for each head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__(attention)
        self.cross_attn = Listed(AttentionHead)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.cross_attn(x, x.flip(1))


def test_heads_of_two_attentions_in_a_layer_stay_apart() -> None:
    module = model(FORMS["named like attention"])
    torch.manual_seed(1)
    module.blocks = nn.Sequential(Decoder(Listed(AttentionHead)), Decoder(Listed(AttentionHead)))
    record = mhacli.effects(module.eval(), IDS, metric=logit)
    measured = [(each.kind, each.layer, each.head) for each in record.effects]
    kinds = ("self", "cross")
    assert measured == [(kind, n, head) for n in (0, 1) for kind in kinds for head in range(4)]
