"""Attention that people write out in `mhacli.inspecting`: the weights shown are those that the
values were multiplied with, of the text and the head that they are shown under, or nothing says ok.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import record_without
from torch import Tensor, nn

import mhacli

pytestmark = pytest.mark.real
Attend = Callable[[Any, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The head outputs and the weights of queries, keys, values and a mask of later keys."""


class SelfAttention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.mix = nn.Parameter(torch.eye(4) + 0.3 * torch.randn(4, 4))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        z, self.used = self.attend(self, *parts, later)
        return z.transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, attend: Attend) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([SelfAttention(attend), SelfAttention(attend)])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def softmax(q: Tensor, k: Tensor, later: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / 2
    return (scores if later is None else scores.masked_fill(later, -torch.inf)).softmax(dim=-1)


def masked(_: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(q, k).masked_fill(later, 0.0)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-13)
    return weights @ v, weights


def masked_in_place(
    _: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor
) -> tuple[Tensor, Tensor]:
    weights = softmax(q, k)
    weights[..., later] = 0.0
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights @ v, weights


def not_scaled(_: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.where(later, torch.zeros(()), softmax(q, k))
    return weights @ v, weights


def mixed(own: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("hg,bgij->bhij", own.mix, softmax(q, k, later))
    return torch.einsum("bhij,bhjd->bhid", weights, v), weights


def mixed_as_columns(
    own: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor
) -> tuple[Tensor, Tensor]:
    weights = (softmax(q, k, later).permute(0, 2, 3, 1) @ own.mix).permute(0, 3, 1, 2)
    return weights @ v, weights


def inspected(attend: Attend, n_texts: int) -> tuple[Any, Any]:
    model = Net(attend).eval()
    ids = torch.randint(1, 50, (n_texts, 7), generator=torch.Generator().manual_seed(1))
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(ids)
    return model, seen.record


@pytest.mark.parametrize("attend", [masked, masked_in_place])
def test_weights_that_are_masked_after_the_softmax_are_shown_as_used(attend: Attend) -> None:
    model, record = inspected(attend, n_texts=2)
    assert record.self_check.ok
    for layer in range(2):
        for text in range(2):
            shown = record.pattern(layer=layer, batch=text).values
            np.testing.assert_allclose(shown, model.layers[layer].used[text], rtol=0, atol=2e-6)


@pytest.mark.parametrize("attend", [not_scaled, mixed, mixed_as_columns])
def test_weights_that_do_not_follow_from_the_softmax_are_marked(attend: Attend) -> None:
    model, record = inspected(attend, n_texts=2)
    assert not record.self_check.ok
    assert "self-check ok" not in repr(record)
    for layer in record.layers:
        assert not layer.verified
        shown = record.pattern(layer=layer.layer).values
        is_used = np.allclose(shown, model.layers[layer.layer].used[0], rtol=0, atol=2e-6)
        assert is_used == (attend is not mixed_as_columns)


def test_edges_of_weights_that_do_not_follow_from_the_softmax_are_not_removed() -> None:
    model = Net(mixed).eval()
    with (
        pytest.raises(mhacli.MhaError, match="changes weights after the softmax"),
        mhacli.removed(model, edges=[(0, 1, 3, 2)]),
    ):
        model(torch.tensor([[1, 2, 3, 4]]))


def text_by_text(_: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    weights = [softmax(one, keys, later) for one, keys in zip(q, k, strict=True)]
    return torch.stack([w @ one for w, one in zip(weights, v, strict=True)]), torch.stack(weights)


def by_number(_: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    z = [
        nn.functional.scaled_dot_product_attention(q[i], k[i], v[i], ~later) for i in range(len(q))
    ]
    return torch.stack(z), torch.stack([*q])


@pytest.mark.parametrize("n_texts", [2, 4])
@pytest.mark.parametrize("attend", [text_by_text, by_number])
def test_heads_of_one_text_are_not_shown_as_texts(attend: Attend, n_texts: int) -> None:
    with pytest.raises(mhacli.MhaError, match="some texts at a time"):
        inspected(attend, n_texts)
    _, record = inspected(attend, n_texts=1)
    assert record.pattern(layer=0).values.shape == (4, 7, 7)
    with (
        pytest.raises(mhacli.MhaError, match="nothing can be removed"),
        mhacli.removed(model := Net(attend).eval(), heads=[(0, 1)]),
    ):
        model(torch.ones(n_texts, 7, dtype=torch.long))


def sliced(_: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    pairs = zip(q.split(1), k.split(1), v.split(1), strict=True)
    both = [((w := softmax(a, b, later)) @ c, w) for a, b, c in pairs]
    return torch.cat([z for z, _ in both]), torch.cat([w for _, w in both])


def head_by_head(_: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    both = [((w := softmax(q[:, h], k[:, h], later)) @ v[:, h], w) for h in range(4)]
    return torch.stack([z for z, _ in both], dim=1), torch.stack([w for _, w in both], dim=1)


def in_one_axis(_: Any, q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(q.flatten(0, 1), k.flatten(0, 1), later)
    z = weights @ v.flatten(0, 1)
    return z.unflatten(0, (len(q), 4)), weights.unflatten(0, (len(q), 4))


@pytest.mark.parametrize("n_texts", [2, 4])
@pytest.mark.parametrize("attend", [sliced, head_by_head, in_one_axis])
def test_texts_and_heads_in_other_axes_are_shown(attend: Attend, n_texts: int) -> None:
    model, record = inspected(attend, n_texts)
    used = {index: layer.used for index, layer in enumerate(model.layers)}
    found = set()
    for i, layer in enumerate(record.layers):
        for row in range(layer.positions[0] if layer.positions else n_texts):
            pattern = record.of_layer(i).pattern(batch=row)
            for weights in pattern.values:
                gaps = (used[layer.layer].detach() - torch.tensor(weights)).abs().amax(dim=(-1, -2))
                ((text, head),) = (gaps < 2e-6).nonzero().tolist()
                found.add((layer.layer, text, head))
                assert text == row or pattern.key_tokens[0] == "x0"
    assert len(found) == 2 * n_texts * 4


@pytest.mark.parametrize("outside", [True, False])
def test_heads_and_edges_of_code_are_removed_in_the_record(outside: bool) -> None:
    ids = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    plain = inspected(masked, n_texts=2)[1].pattern(layer=0).values
    model = Net(masked).eval()
    choice: dict[str, Any] = {"heads": [(0, 2)], "edges": [(0, 1, 5, 2)]}
    record = record_without(model, ids, outside=outside, **choice)
    plain[1, 5, 2] = 0
    plain[1, 5] /= plain[1, 5].sum()
    np.testing.assert_allclose(record.pattern(layer=0).values, plain, rtol=0, atol=2e-6)
    assert (record.arrays["layers.0.z"][0, 2] == 0).all()
