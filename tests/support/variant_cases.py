"""Runs of every variant of attention, and what plain loops say of them.

Which cell a mask allows is written here as a sentence in Python about two indices: nothing of mhacli says it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mhacli.compute.base.setup import Setup, make_setup
from mhacli.requests.layer import layer_request
from mhacli.spec.config import ROPE, Config
from mhacli.text.encode import encode
from support import oracle

TEXTS = ["the cat | sat on the", "a | cat sat", "mat | on a cat"]
DOCUMENTS = [[0, 0, 1, 1, 1], [0, 1, 1], [0, 1, 1, 1]]
CONTEXTS = ["a mat sat | the cat on mat", "the | mat", "on on | cat a the"]
CONTEXT_DOCUMENTS = [[0, 0, 0, 1, 1, 1, 1], [0, 1], [0, 0, 1, 1, 1]]
N_HEADS, Q_LEN, K_LEN = 6, 5, 7


class Where(NamedTuple):
    """A query and a key as they stand on their axes, and the place of the key in its own text."""

    i: int
    j: int
    key_place: int


MASKS: Mapping[str, tuple[dict[str, Any], Callable[[Where], bool]]] = {
    "no mask": ({}, lambda w: True),
    "causal": ({"causal": True}, lambda w: w.j <= w.i),
    "window to the left": ({"window": (2, 0)}, lambda w: w.j in (w.i - 2, w.i - 1, w.i)),
    "window to both sides": ({"window": (1, 2)}, lambda w: w.i - 1 <= w.j <= w.i + 2),
    "window, causal": ({"window": (1, 1), "causal": True}, lambda w: w.j in (w.i - 1, w.i)),
    "prefix": ({"prefix": 2}, lambda w: w.key_place < 2 or w.j <= w.i),
    "prefix, causal too": ({"prefix": 3, "causal": True}, lambda w: w.key_place < 3 or w.j <= w.i),
    "prefix and window": ({"prefix": 1, "window": (1, 9)}, lambda w: w.key_place == 0 or w.j in (w.i - 1, w.i)),
    "sink": ({"window": (0, 1), "sink": 1}, lambda w: w.key_place == 0 or w.j in (w.i, w.i + 1)),
    "sink, causal": (
        {"window": (1, 1), "sink": 2, "causal": True},
        lambda w: w.j <= w.i and (w.key_place < 2 or w.j >= w.i - 1),
    ),
    "prefix, window and sink": (
        {"prefix": 2, "window": (0, 0), "sink": 1},
        lambda w: w.key_place < 2 or w.j == w.i,
    ),
}
WIDTHS: Mapping[str, dict[str, Any]] = {
    "all widths different": {"d_model": 11, "d_input": 9, "d_head": 4, "d_v": 8},
    "no output projection": {"d_model": 11, "d_input": 9, "d_head": 2, "d_v": 5, "out_proj": False},
    "no biases": {"d_model": 11, "d_head": 4, "d_v": 3, "bias": False},
    "widths derived": {"d_model": 12},
    "odd d_head": {"d_model": 7, "d_input": 10, "d_head": 3, "d_v": 1},
}
SCORES: Mapping[str, dict[str, Any]] = {
    "plain scores": {},
    "scale": {"scale": -3.0},
    "softcap": {"softcap": 0.5, "scale": 1.5},
    "bias": {"score_bias": "given"},
    "scale, softcap and bias": {"score_bias": "given", "softcap": 1.25, "scale": 4.0},
}
POSITIONS = ("none", "sinusoidal", "learned", "rope", "rope-interleaved", "alibi")


class Case(NamedTuple):
    """One choice of each kind, by name. `kind` is self or cross."""

    positions: str
    mask: str
    packed: bool
    padding: str
    kind: str
    n_kv_heads: int
    widths: str
    scores: str

    def __str__(self) -> str:
        return "-".join(map(str, self)).replace(" ", "_")

    @property
    def is_legal(self) -> bool:
        """Rules of the documentation: order needs one text; pairs of columns need an even d_head."""
        inside = self.positions in (*ROPE, "alibi")
        return not (
            (self.kind == "cross" and (inside or self.mask != "no mask"))
            or (self.positions in ROPE and self.widths == "odd d_head")
        )

    def config(self, bias_file: str | None = None, **others: Any) -> Config:
        """The choices as a resolved config, by default in float64."""
        scores = dict(SCORES[self.scores])
        if "score_bias" in scores:
            scores["score_bias"] = f"{bias_file}:{self.kind}"
        choices = {
            "n_heads": N_HEADS, "n_kv_heads": self.n_kv_heads, "positions": self.positions, "padding": self.padding,
            "init": "uniform", "device": "cpu", "dtype": "float64", "documents": "|" if self.packed else None, "seed": 5,
            "rope_theta": 50.0, "max_positions": 7, **MASKS[self.mask][0], **WIDTHS[self.widths], **scores,
        }  # fmt: skip
        return Config(**choices | others).resolved()


def grid() -> list[Case]:
    """Every combination of positions, mask, documents, padding and kind; with each, the other choices in turn."""
    outer = product(POSITIONS, MASKS, (False, True), ("right", "left"), ("self", "cross"))
    inner = list(product((1, 2, N_HEADS), WIDTHS, SCORES))
    found: list[Case] = []
    at = 0
    for chosen in outer:
        if not Case(*chosen, 1, "all widths different", "plain scores").is_legal:
            continue
        for _ in range(5 if "cross" in chosen else 1):
            at = (at + 13) % len(inner)
            while not Case(*chosen, *inner[at]).is_legal:
                at = (at + 1) % len(inner)
            found.append(Case(*chosen, *inner[at]))
    return found


def setup_of(case: Case, bias_file: str | None = None, **others: Any) -> Setup:
    """The run of a case, made ready."""
    config = case.config(bias_file, **others)
    return make_setup(layer_request(encode(TEXTS, config, context=CONTEXTS if case.kind == "cross" else ()), config))


def weights_of(setup: Setup) -> dict[str, np.ndarray]:
    """The weights that a run computes with, in float64."""
    named = {name: p.detach().double().numpy() for name, p in setup.layer.attention.state_dict().items()}
    return named | {"embed": setup.layer.embedding.double().numpy()}


class Side(NamedTuple):
    """Queries' or keys' rows: ids with −1 for padding, where each text begins, and places in its own text."""

    ids: list[list[int]]
    real: list[list[bool]]
    documents: list[list[int]]
    places: list[list[int]]


def side_of(ids: Sequence[Sequence[int]], documents: Sequence[Sequence[int]], padding: str, packed: bool) -> Side:
    """Rows of one length, filled up as asked for. What padding says of documents and places does not matter."""
    longest = max(map(len, ids))
    sides = Side([], [], [], [])
    for row, of_document in zip(ids, documents, strict=True):
        own = list(of_document) if packed else [0] * len(row)
        place = [sum(own[u] == own[t] for u in range(t)) for t in range(len(row))]
        more = longest - len(row)
        for into, content, fill in zip(sides, (row, [True] * len(row), own, place), (-1, False, -7, 0), strict=True):
            into.append([*[fill] * more, *content] if padding == "left" else [*content, *[fill] * more])
    return sides


class Expected(NamedTuple):
    """What the loops say."""

    x: np.ndarray
    allowed: np.ndarray
    layer: oracle.VariantResult


def expected_of(case: Case, setup: Setup, bias: Any = None) -> Expected:
    """The whole run by loops. `bias` is `[head][query][key]`; −∞ in it means masked."""
    config, weights = setup.config, weights_of(setup)
    queries = side_of([s.ids for s in setup.encoded.sequences], DOCUMENTS, case.padding, case.packed)
    keys = queries
    if setup.encoded.context is not None:
        keys = side_of([s.ids for s in setup.encoded.context], CONTEXT_DOCUMENTS, case.padding, case.packed)
    table = None if setup.layer.position_table is None else setup.layer.position_table.double().numpy()
    x, rows = (
        oracle.placed(s.ids, s.places, weights["embed"], positions=case.positions, table=table) for s in (queries, keys)
    )
    rule = MASKS[case.mask][1]

    def is_allowed(b: int, i: int, j: int) -> bool:
        return (
            queries.real[b][i]
            and keys.real[b][j]
            and queries.documents[b][i] == keys.documents[b][j]
            and rule(Where(i, j, keys.places[b][j]))
        )

    shape = (len(queries.ids), N_HEADS, len(queries.ids[0]), len(keys.ids[0]))
    allowed = oracle.full(is_allowed, *shape)
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias, dtype=np.float64), shape)
        for cell in np.ndindex(*shape):
            allowed[cell] = allowed[cell] and bias[cell] != -np.inf
        bias = np.where(bias == -np.inf, 0.0, bias)
    result = oracle.variant(
        x, weights, n_heads=N_HEADS, n_kv_heads=case.n_kv_heads, places=queries.places, positions=case.positions,
        theta=config.rope_theta, context=rows if case.kind == "cross" else None, scale=config.scale,
        softcap=config.softcap, bias=bias, allowed=allowed,
    )  # fmt: skip
    return Expected(x, allowed, result)
