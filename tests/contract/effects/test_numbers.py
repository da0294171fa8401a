"""`mha effect --model`: each row of the table is what the same removal by hand changes, in every
family and by every measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints, some
from support.checkpoints import N_HALF, N_HEADS, N_LAYERS, PAIRS
from support.removal import changes, described, output

TEXT = "the cat sat on the mat"
N = {"gpt2": 13, "llama": 14, "gpt_oss": 13, "mistral": 13}
"""Tokens of the text."""
SINGLE = {"gpt_oss": 2e-5, "mixtral": 2e-5}
"""Families whose experts cannot be computed in float64, and the tolerance of their numbers."""
FLOAT32_INSIDE = {"gemma2": 1e-4, "gemma3_text": 1e-4, "gpt_neox": 1e-4, "bloom": 1e-4}
"""Families with a softmax in float32 whatever the model is in, and the tolerance of removed
edges."""
CAUSAL = ("gpt2", "llama", "mistral", "gpt_oss")
MORE = "qwen3 gemma2 gemma3_text gpt_neox bloom falcon falcon-alibi mixtral albert".split()

Place = tuple[Any, ...]
"""`removed`, `kind`, `layer`, `head`, `query` and `key` of a row, or the first of them."""


def heads(
    layers: Iterable[int] = range(N_LAYERS), kind: str = "self", of: Iterable[int] = range(N_HEADS)
) -> list[Place]:
    """The rows of removed heads."""
    return [("head", kind, layer, head, None, None) for layer in layers for head in of]


def edges(
    places: Iterable[tuple[int, int | None]], query: int, n_keys: int, kind: str = "self"
) -> list[Place]:
    """The rows of removed edges."""
    return [
        ("edge", kind, layer, head, query, key) for layer, head in places for key in range(n_keys)
    ]


def inputs_of(family: str, document: Any) -> dict[str, torch.Tensor]:
    """What the model of a document reads."""
    ids = torch.tensor([document["sequences"][0]["ids"]])
    if family not in PAIRS:
        return {"input_ids": ids}
    return {"input_ids": torch.tensor([document["context"][0]["ids"]]), "decoder_input_ids": ids}


def span(document: Any, word: str) -> list[int]:
    """The tokens that have characters of a word."""
    start = TEXT.index(word)
    offsets = document["sequences"][0]["offsets"]
    return [i for i, (a, b) in enumerate(offsets) if a < start + len(word) and start < b]


def measured(mha: Any, family: str, *words: str) -> Any:
    """The document of the command, in the widest number format that the family can be computed
    in.
    """
    dtype = "float32" if family in SINGLE else "float64"
    model = ("--model", checkpoints.folder(family))
    command = ("effect", TEXT, *model, "--dtype", dtype, "--json", *words)
    return mha(*command).json


def assert_as_by_hand(family: str, document: Any, tolerance: float) -> None:
    """Every measure of every row, and what stands there without a removal."""
    model = checkpoints.model(family, dtype="float32" if family in SINGLE else "float64")
    inputs, summary = inputs_of(family, document), document["effect"]
    spans = {name: span(document, word) for name, word in (("a", "cat"), ("b", "mat"))}
    before = output(family, model, inputs, summary["position"])
    target, versus = summary["target_id"], summary["versus_id"]
    assert summary["metric"] == "d_logit"
    assert summary["logit"] == pytest.approx(
        before.logits[target] - (before.logits[versus] if versus else 0), abs=tolerance
    )
    logprob = before.logits[target] - np.logaddexp.reduce(before.logits)
    assert summary["logprob"] == pytest.approx(logprob, abs=tolerance)
    assert summary["rank"] == (before.logits > before.logits[target]).sum()
    for effect in document["effects"]:
        after = output(family, model, inputs, summary["position"], described(effect, spans))
        expected = changes(before, after, target, versus)
        assert {name: effect[name] for name in expected} == pytest.approx(
            expected, abs=tolerance
        ), effect
    assert max(abs(effect["d_logit"]) for effect in document["effects"]) > 1e-4, "something happens"
    assert summary["verified"]["ok"]


ROWS: dict[str, tuple[str, Sequence[str], list[Place]]] = {
    **{f"{name}-all": (name, (), heads()) for name in CAUSAL},
    "bert-all": ("bert", (), heads()),
    "t5-all": (
        "t5",
        (),
        heads(range(N_HALF), "encoder")
        + [
            place
            for layer in range(N_HALF)
            for kind in ("decoder", "cross")
            for place in heads([layer], kind)
        ],
    ),
    "mean": ("llama", ("--replace", "mean"), heads()),
    "mean of a pair": ("t5", ("--replace", "mean", "--layer", "encoder.1"), heads([1], "encoder")),
    "mean at one position": (
        "gpt2",
        ("--replace", "mean", "--at", "3", "--layer", "0,2"),
        heads([0, 2]),
    ),
    "zero at one position": ("llama", ("--at", "5"), heads()),
    "another position and target": (
        "gpt2",
        ("--position", "7", "--target", " the", "--layer", "1"),
        heads([1]),
    ),
    "two targets": ("llama", ("--target", "a", "--versus", "t", "--layer", "1"), heads([1])),
    "together": (
        "llama",
        ("--head", "2.1,0.3"),
        [*heads([0], of=[3]), *heads([2], of=[1]), ("heads",)],
    ),
    "together at one position": (
        "mistral",
        ("--head", "0.2,0.4,1.5", "--at", "9", "--replace", "mean"),
        [*heads([0], of=[2, 4]), *heads([1], of=[5]), ("heads",)],
    ),
    "together in a pair": (
        "t5",
        ("--head", "cross.0.1,decoder.1.3"),
        [*heads([0], "cross", [1]), *heads([1], "decoder", [3]), ("heads",)],
    ),
    **{
        f"{name}-edges": (
            name,
            ("--edges", "--position", "8"),
            edges([(layer, None) for layer in range(N_LAYERS)], 8, N[name]),
        )
        for name in CAUSAL
    },
    "edges of heads": (
        "llama",
        ("--edges", "--head", "1.2,2.5", "--position", "9"),
        edges([(1, 2), (2, 5)], 9, N["llama"]),
    ),
    "edges of bert": (
        "bert",
        ("--edges", "--layer", "1", "--position", "4"),
        edges([(1, None)], 4, N["gpt2"]),
    ),
    "edges of cross-attention": (
        "t5",
        ("--edges", "--head", "cross.1.2"),
        edges([(1, 2)], 0, 14, "cross"),
    ),
    "a span": (
        "llama",
        ("--span", "a=/cat/", "--span", "b=/mat/", "--cut", "a:b"),
        [("spans", "self")],
    ),
    "a span in a layer": (
        "gpt_oss",
        ("--span", "a=/cat/", "--span", "b=/mat/", "--cut", "a:b", "--layer", "1"),
        [("spans", "self", 1, None, None, None)],
    ),
}


MORE_ROWS = (
    "mistral-all",
    "gpt_oss-all",
    "bert-all",
    "mistral-edges",
    "gpt_oss-edges",
    "gpt2-edges",
    "mean of a pair",
    "mean at one position",
    "zero at one position",
    "two targets",
    "together",
    "together in a pair",
    "edges of heads",
    "edges of bert",
    "a span in a layer",
    "gpt2-all",
)


@pytest.mark.parametrize("row", some(ROWS, default=ROWS.keys() - set(MORE_ROWS)))
def test_a_removal_changes_what_it_changes_by_hand(mha: Any, row: str) -> None:
    family, words, expected = ROWS[row]
    document = measured(mha, family, *words)
    fields = ("removed", "kind", "layer", "head", "query", "key")
    computed = [tuple(effect[field] for field in fields) for effect in document["effects"]]
    assert [place[: len(one)] for place, one in zip(computed, expected, strict=True)] == expected
    assert_as_by_hand(family, document, SINGLE.get(family, 1e-9))


@pytest.mark.real
@pytest.mark.parametrize("family", [*MORE, "bart"])
def test_heads_of_more_families_change_what_they_change_by_hand(mha: Any, family: str) -> None:
    document = measured(mha, family)
    assert len(document["effects"]) == N_HEADS * (3 * N_HALF if family in PAIRS else N_LAYERS)
    assert_as_by_hand(family, document, SINGLE.get(family, 1e-8))


@pytest.mark.real
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "gpt_neox", "mixtral"])
def test_edges_of_more_families_change_what_they_change_by_hand(mha: Any, family: str) -> None:
    document = measured(mha, family, "--edges", "--position", "9", "--head", "0.1,1.3,2.5")
    assert_as_by_hand(family, document, {**FLOAT32_INSIDE, **SINGLE}.get(family, 1e-8))


@pytest.mark.real
@pytest.mark.parametrize("family", ["mpt", "deberta-v2", "falcon-alibi", "bloom", "albert"])
def test_edges_are_verified_whatever_kind_of_mask_a_family_reads(mha: Any, family: str) -> None:
    document = measured(mha, family, "--edges", "--head", "0.1,1.3,2.5", "--verify", "9")
    assert document["effect"]["verified"] | {"max_abs_error": 0, "tolerance": 0} == {
        "n": 9,
        "ok": True,
        "identical": True,
        "max_abs_error": 0,
        "tolerance": 0,
    }
