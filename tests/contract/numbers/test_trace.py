"""`mha trace`: the steps with their shapes, costs and values, how one attention weight is made, and
the mask alone.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import oracle
from support.layers import cells, expected, require_near, weights_of
from support.mha import run

TEXTS, CONTEXTS = (
    ["the cat sat on the mat", "a cat"],
    ["some other words", "words that are some other"],
)
SIZES = (
    "--d-model 10 --heads 4 --kv-heads 2 --d-head 6 --d-v 3 --init uniform --dtype float64".split()
)
ROUTES = ("separate", "fused", "per-head")
B, H, G, Q, D, V, M = 2, 4, 2, 6, 6, 3, 10


def costs(
    k_len: int,
    *,
    bias: bool = True,
    softcap: bool = False,
    n_added: int = 0,
    n_in: int = 10,
    n_kv: int = G,
) -> dict[str, int]:
    """Operations of every site: a sum, a product or a function of one number is one."""
    cell, q_rows, k_rows = (
        B * H * Q * k_len,
        B * Q * (2 * n_in + bias),
        B * k_len * (2 * n_in + bias),
    )
    q, k, v = q_rows * H * D, k_rows * n_kv * D, k_rows * n_kv * V
    return {
        "ids": 0,
        "random": 0,
        "embed": 0,
        "bias": 0,
        "q": 0,
        "k": 0,
        "v": 0,
        "concat": 0,
        "positions": 2 * Q * n_in,
        "x": B * Q * n_in,
        "context": (B + 2) * k_len * n_in,
        "q_proj": q,
        "q_per_head": q,
        "k_proj": k,
        "k_per_head": k,
        "v_proj": v,
        "v_per_head": v,
        "qkv": q + k + v,
        "kv": k + v,
        "q_rot": 3 * B * H * Q * D,
        "k_rot": 3 * B * n_kv * Q * D,
        "alibi": H * Q * k_len,
        "qk": 2 * D * cell,
        "scores": cell * (1 + 3 * softcap + n_added),
        "pattern": 5 * cell,
        "dropped": 2 * cell,
        "z": 2 * k_len * B * H * Q * V,
        "head_out": 2 * V * B * H * Q * M,
        "out": B * Q * M * (2 * H * V + bias),
        "out_sum": B * Q * M * (H - 1 + bias),
    }


def shapes(k_len: int) -> dict[str, tuple[int, ...]]:
    """The shape of every site, for the sizes above."""
    pattern = (B, H, Q, k_len)
    return {
        "ids": (B, Q),
        "embed": (B, Q, M),
        "positions": (Q, M),
        "x": (B, Q, M),
        "context": (B, k_len, M),
        "q_proj": (B, Q, H * D),
        "k_proj": (B, k_len, G * D),
        "v_proj": (B, k_len, G * V),
        "qkv": (B, Q, H * D + G * (D + V)),
        "kv": (B, k_len, G * (D + V)),
        "q": (B, H, Q, D),
        "k": (B, G, k_len, D),
        "v": (B, G, k_len, V),
        "q_per_head": (B, H, Q, D),
        "k_per_head": (B, G, k_len, D),
        "v_per_head": (B, G, k_len, V),
        "q_rot": (B, H, Q, D),
        "k_rot": (B, G, Q, D),
        "alibi": (H, Q, k_len),
        "bias": pattern,
        "qk": pattern,
        "scores": pattern,
        "pattern": pattern,
        "z": (B, H, Q, V),
        "concat": (B, Q, H * V),
        "head_out": (B, H, Q, M),
        "out": (B, Q, M),
        "out_sum": (B, Q, M),
    }


SITES = {
    "separate": "q_proj q k_proj k v_proj v qk scores pattern z concat out",
    "fused": "qkv q k v qk scores pattern z concat out",
    "per-head": "q_per_head k_per_head v_per_head qk scores pattern z head_out out_sum",
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {}),
    "no biases": ("--no-bias", {"bias": False}),
    "softcap": ("--softcap 5", {"softcap": True}),
    "dropout": ("--train --dropout 0.5", {}),
    "all key heads": ("--kv-heads 4", {"n_kv": 4}),
    "other input": ("--d-input 7 --no-bias --kv-heads 1", {"n_in": 7, "bias": False, "n_kv": 1}),
    "rope": ("--positions rope", {"positions": 0, "x": 0}),
    "interleaved, left": ("--positions rope-interleaved --padding left", {"positions": 0, "x": 0}),
    "alibi": (
        "--positions alibi --softcap 5",
        {"positions": 0, "x": 0, "softcap": True, "n_added": 1},
    ),
    "alibi, left": (
        "--positions alibi --padding left",
        {"positions": 0, "x": 0, "n_added": 1, "alibi": 2 * H * Q * Q},
    ),
    "learned": ("--positions learned", {"positions": 0}),
    "none": ("--positions none --causal", {"positions": 0, "x": 0}),
    "sinusoidal, left": ("--padding left", {"positions": 4 * Q * M}),
    "score bias": ("--score-bias b.st --positions none", {"positions": 0, "x": 0, "n_added": 1}),
}


def traced(
    mha: Any, *words: str, texts: list[str] = TEXTS, context: list[str] | None = None
) -> Any:
    contexts = [word for text in context or [] for word in ("--context", text)]
    return mha("trace", *texts, *contexts, *SIZES, *words, "--repeat", "1", "--json").json


@pytest.mark.parametrize(
    ("name", "route"),
    [(name, ROUTES[(n + m) % 3]) for n, name in enumerate(CASES) for m in range(1 + (n in (0, 8)))],
)
def test_every_step_costs_what_it_computes(name: str, route: str, mha: Any, tmp_path: Path) -> None:
    words, changes = CASES[name]
    if "bias" in words:
        save_file({"bias": torch.ones(H, Q, Q)}, tmp_path / "b.st")
    how = {
        key: changes[key]
        for key in changes
        if key in ("bias", "softcap", "n_added", "n_in", "n_kv")
    }
    right = costs(Q, **how) | {key: number for key, number in changes.items() if key not in how}
    document = traced(mha, "--route", route, *words.split())
    assert {step["site"]: step["flops"] for step in document["trace"]} == {
        step["site"]: right[step["site"]] for step in document["trace"]
    }
    by_kind = {
        "rope": {"q_rot", "k_rot"},
        "interleaved": {"q_rot", "k_rot"},
        "alibi": {"alibi"},
        "score bias": {"bias"},
    }
    special = {step["site"] for step in document["trace"]} & set(
        "q_rot k_rot alibi bias dropped".split()
    )
    assert special == by_kind.get(name.split(",")[0], {"dropped"} if name == "dropout" else set())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("context", [None, CONTEXTS])
def test_every_step_tells_its_shape_its_bytes_its_formula_and_its_weights(
    context: list[str] | None, route: str, mha: Any
) -> None:
    k_len = 5 if context else Q
    words = ["--route", route, "--dtype", "float16"]
    document = traced(mha, *words, context=context)
    steps = {step["site"]: step for step in document["trace"]}
    kept = traced(mha, *words, "--keep", ",".join(steps), context=context)
    begin = ["ids", "embed", "positions", "x", *(["context"] if context else [])]
    fused = ["q_proj", "kv", *SITES["fused"].split()[1:]] if context else SITES["fused"].split()
    assert list(steps) == begin + (fused if route == "fused" else SITES[route].split())
    for site, step in steps.items():
        assert tuple(step["shape"]) == shapes(k_len)[site], site
        assert site == "context" or np.shape(kept[site]) == shapes(k_len)[site], site
        assert (
            step["bytes"]
            == prod(step["shape"]) * {"int64": 8, "float32": 4, "float16": 2}[step["dtype"]]
        )
        assert len(step["axes"]) == len(step["shape"]) == len(step["strides"])
        assert " = " in step["formula"]
        assert step["meaning"]
        assert (step["layout"] == "view") == (step["view_of"] is not None)
        assert step["flops"] == costs(k_len)[site]
    assert {site for site, step in steps.items() if step["dtype"] != "float16"} == {"ids", "scores"}
    named = {
        site: [parameter["name"] for parameter in step["parameters"]]
        for site, step in steps.items()
    }
    output = "head_out" if route == "per-head" else "out"
    assert (named["embed"], named["pattern"]) == (["embed.weight"], [])
    assert named[output] == ["o_proj.weight", "o_proj.bias"]
    assert steps[output]["parameters"][0]["shape"] == [M, H * V]


def test_heads_are_views_of_the_projections(mha: Any) -> None:
    views = {
        step["site"]: (step["view_of"], step["strides"])
        for step in traced(mha)["trace"]
        if step["view_of"]
    }
    assert views == {
        "q": ("q_proj", [Q * H * D, D, H * D, 1]),
        "k": ("k_proj", [Q * G * D, D, G * D, 1]),
        "v": ("v_proj", [Q * G * V, V, G * V, 1]),
    }
    width = H * D + G * (D + V)
    fused = {
        step["site"]: (step["view_of"], step["strides"])
        for step in traced(mha, "--route", "fused")["trace"]
    }
    assert fused["q"] == fused["k"] == ("qkv", [Q * width, D, width, 1])
    assert fused["v"] == ("qkv", [Q * width, V, width, 1])


@pytest.mark.parametrize(
    "options",
    ["--causal", "--no-out-proj --positions alibi", "--kv-heads 4 --no-bias --positions rope"],
)
def test_all_routes_give_the_same_output(options: str, mha: Any) -> None:
    for context in (
        (None, CONTEXTS) if options.startswith("--no") and "alibi" not in options else (None,)
    ):
        documents = [
            traced(mha, *options.split(), "--route", route, context=context) for route in ROUTES
        ]
        assert all(document["self_check"]["ok"] for document in documents)
        outputs = [np.array(document["out"]) for document in documents]
        assert max(np.abs(out - outputs[0]).max() for out in outputs) <= 1e-13


def test_values_summarise_every_tensor(mha: Any) -> None:
    document = traced(mha, "--values", "--causal", "--keep", "out,pattern,scores")
    steps = {step["site"]: step["values"] for step in document["trace"]}
    for site in ("out", "pattern"):
        numbers, values = cells(document[site]), steps[site]
        assert (values["min"], values["max"]) == (numbers.min(), numbers.max())
        assert (values["mean"], values["std"]) == pytest.approx(
            (numbers.mean(), numbers.std()), abs=1e-14
        )
        assert values["histogram"] == np.histogram(numbers, bins=16)[0].tolist()
        assert (values["n_nan"], values["n_inf"]) == (0, 0)
    assert (
        steps["scores"]["n_inf"]
        == np.isnan(cells(document["scores"])).sum()
        == H * (36 - 21) + H * (36 - 3)
    )
    assert all(step["values"] is None for step in traced(mha)["trace"])


# --------------------------------------------------------------------------------------- one weight

PARTED = ["the cat | sat on the | mat a", "a mat | sat"]
PARTED_CONTEXTS = ["on | mat the | a cat", "the sat cat a on | mat"]
BIAS = torch.randn(6, 7, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
CELLS = ("0,4,2", "5,3,3"), ("3,2,0", "2,1,2")
SCORED = {
    "plain": "",
    "softcap": "--softcap 0.4",
    "bias": "--score-bias b.st",
    "softcap and bias": "--softcap 0.7 --score-bias b.st",
    "left, documents": "--padding left --documents | --window 2,2",
    "one key head": "--kv-heads 1 --causal",
    "float32": "--dtype float32",
}
POSITIONS = ("none", "sinusoidal", "learned", "rope", "rope-interleaved", "alibi")
LAYER = (
    "--d-model 5 --heads 6 --kv-heads 2 --d-head 4 --d-v 3 --d-input 9 --init uniform --scale 1.5"
    " --seed 6".split()
)
MORE = {
    "learned": ["--max-positions", "9"],
    "rope": ["--rope-theta", "30"],
    "rope-interleaved": ["--rope-theta", "30"],
}


def cell_of(
    mha: Any, place: str, sequence: int, *words: str, texts: list[str] = PARTED
) -> tuple[Any, Any]:
    more = MORE.get(words[words.index("--positions") + 1], []) if "--positions" in words else []
    dtype = [*more, *([] if "--dtype" in words else ["--dtype", "float64"])]
    rest = f"--repeat 1 --cell {place} --sequence {sequence} --json".split()
    rest += ["--keep", "q,k,v,qk,scores,pattern,z"]
    document = mha("trace", *texts, *LAYER, *dtype, *words, *rest).json
    return document["cell"], document


@pytest.mark.parametrize(
    ("name", "positions"),
    [(name, POSITIONS[m]) for n, name in enumerate(SCORED) for m in range(n % 3, 6, 3)],
)
def test_the_parts_of_a_score_add_up_to_it(
    name: str, positions: str, mha: Any, tmp_path: Path
) -> None:
    options = SCORED[name].split()
    n = (POSITIONS.index(positions) + list(SCORED).index(name)) % 4
    sequence, place = n // 2, CELLS[n // 2][n % 2]
    if name == "left, documents":
        sequence, place = [(0, "1,3,2"), (1, "4,1,0"), (1, "2,0,1"), (0, "5,6,5")][n]
    if name == "one key head":
        sequence, place = [(0, "1,3,2"), (1, "4,1,0"), (1, "5,2,1"), (0, "5,6,5")][n]
    save_file({"bias": BIAS}, tmp_path / "b.st")
    cell, document = cell_of(mha, place, sequence, "--positions", positions, *options)
    require_cell(cell, document, 1e-5 if name == "float32" else 1e-10)
    kinds = [part["kind"] for part in cell["parts"]]
    assert ("softcap" in kinds) == ("softcap" in name)
    assert ("given" in kinds) == ("bias" in name)
    assert ("position" in kinds) == (positions != "none")
    assert kinds.count("both") == (2 if positions in ("sinusoidal", "learned") else 0)


def require_cell(cell: Any, document: Any, tolerance: float) -> None:
    """The numbers of a cell are those of the tensors, and its parts add up to its score."""
    config, b, h = document["config"], cell["sequence"], cell["head"]
    sides = [oracle.side(document["sequences"], config["padding"])]
    sides.append(
        sides[0]
        if document["context"] is None
        else oracle.side(document["context"], config["padding"])
    )
    i, j = (
        place + np.argmax(side.real[b])
        for place, side in zip((cell["query"], cell["key"]), sides, strict=True)
    )
    kv_head = h // (config["n_heads"] // config["n_kv_heads"])
    at = {"qk": (b, h, i, j), "share": (b, h, i, j), "z": (b, h, i), "v": (b, kv_head, j)}
    for name, index in at.items():
        tensor = cells(document["pattern" if name == "share" else name])[index]
        if name != "qk" or cell["allowed"]:
            assert np.allclose(cell[name], tensor, rtol=0, atol=tolerance / 10), name
    assert cell["qk"] == pytest.approx(np.dot(cell["q"], cell["k"]), abs=tolerance)
    score = cells(document["scores"])[b, h, i, j]
    assert cell["allowed"] == np.isfinite(score)
    assert cell["score"] == (pytest.approx(score, abs=tolerance / 10) if cell["allowed"] else None)
    real = sides[1].real[b]
    for row, tensor in {"scores_row": "scores", "pattern_row": "pattern"}.items():
        numbers = cells(document[tensor])[b, h, i, real]
        assert np.allclose(cells(cell[row]), numbers, rtol=0, atol=tolerance / 10, equal_nan=True)
    if cell["allowed"]:
        assert sum(part["value"] for part in cell["parts"]) == pytest.approx(score, abs=tolerance)


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned"])
@pytest.mark.parametrize("options", ["", "--padding left --documents |"])
def test_the_parts_of_a_score_of_two_texts_add_up_to_it(
    options: str, positions: str, mha: Any
) -> None:
    texts = ["the cat | sat", "a mat | sat"] if "documents" in options else PARTED
    contexts = (
        ["on mat | the a cat", "the sat cat a on mat | cat"]
        if "documents" in options
        else PARTED_CONTEXTS
    )
    both = ("--context", contexts[0], "--context", contexts[1])
    words = [*options.split(), *both, "--positions", positions]
    sequence, place = {"none": (0, "1,0,1"), "sinusoidal": (1, "5,2,5"), "learned": (0, "3,2,4")}[
        positions
    ]
    cell, document = cell_of(mha, place, sequence, *words, texts=texts)
    require_cell(cell, document, 1e-10)


@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_the_content_of_a_score_is_the_score_without_positions(positions: str, mha: Any) -> None:
    cell, _ = cell_of(mha, "3,2,0", 1, "--positions", positions, "--padding", "left")
    without, _ = cell_of(mha, "3,2,0", 1, "--positions", "none", "--padding", "left")
    content = [part["value"] for part in cell["parts"] if part["kind"] == "content"]
    assert content == pytest.approx([without["score"]], abs=1e-12)
    rest = sum(part["value"] for part in cell["parts"] if part["kind"] == "position")
    assert rest == pytest.approx(cell["score"] - without["score"], abs=1e-12)
    if positions == "alibi":
        assert rest == pytest.approx(-oracle.slopes(6)[3] * 2, abs=1e-12)


def test_places_are_counted_inside_a_document(mha: Any) -> None:
    for positions in ("learned", "rope-interleaved"):
        packed, _ = cell_of(mha, "1,4,2", 0, "--positions", positions, "--documents", "|")
        alone, _ = cell_of(
            mha, "1,2,0", 0, "--positions", positions, texts=["sat on the", "the cat mat a"]
        )
        assert [part["value"] for part in packed["parts"]] == pytest.approx(
            [part["value"] for part in alone["parts"]], abs=1e-12
        )


def test_a_masked_cell_has_parts_and_no_score(mha: Any) -> None:
    cell, _ = cell_of(mha, "2,1,4", 0, "--causal", "--softcap", "2", "--positions", "rope")
    assert (cell["allowed"], cell["score"], cell["share"]) == (False, None, 0.0)
    assert cell["pattern_row"][2:] == [0.0] * 5
    seen, _ = cell_of(mha, "2,1,4", 0, "--softcap", "2", "--positions", "rope")
    assert sum(part["value"] for part in cell["parts"]) == pytest.approx(seen["score"], abs=1e-10)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["--cell", "0,0,0", "--sequence", "2"], "2"),
        (["--cell", "4,0,0"], "head 4"),
        (["--cell", "0,6,0"], "query 6"),
        (["--cell", "0,2,0", "--sequence", "1"], "query 2"),
        (["--cell", "0,0,9"], "key 9"),
        (["--cell", "1,2"], "1,2"),
    ],
)
def test_a_cell_outside_of_the_pattern_is_refused(words: list[str], number: str, mha: Any) -> None:
    assert number in mha("trace", *TEXTS, *SIZES, *words, "--json", code=2).said


# --------------------------------------------------------------------------------------------- mask

MASKS = {
    "none": "",
    "causal": "--causal",
    "window": "--window 1,2",
    "prefix": "--prefix 2",
    "prefix and window": "--prefix 1 --window 1,9",
    "sink window": "--window 0,1 --sink-window 1 --causal",
    "all": "--prefix 2 --window 0,0 --sink-window 1",
}
PACKED = ["the cat | sat on the", "a | cat sat", "mat | on a cat"]


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_alone_has_the_cells_of_its_rules(name: str, mha: Any) -> None:
    for padding, documents in (("left", []), ("right", ["--documents", "|"])):
        words = [*PACKED, *MASKS[name].split(), "--padding", padding, "--mask"]
        document = mha("trace", *words, *documents, "--json").json
        assert document["schema"] == "mha.mask/1"
        side = oracle.side(document["sequences"], padding)
        rules = {rule: document["config"][rule] for rule in ("causal", "window", "prefix", "sink")}
        for allowed, mask in zip(
            oracle.visible(side, side, **rules)[:, 0], document["masks"], strict=True
        ):
            assert mask["block_counts"] == allowed.astype(int).tolist()
            assert mask["visible_per_query"] == allowed.sum(axis=-1).tolist()
            assert (mask["n_visible"], mask["n_cells"], mask["block"]) == (allowed.sum(), 25, 1)
            assert mask["density"] == allowed.sum() / 25


def test_the_mask_of_two_texts_has_an_axis_for_each(mha: Any) -> None:
    document = mha(
        "trace", *TEXTS, "--context", CONTEXTS[0], "--context", CONTEXTS[1], "--mask", "--json"
    ).json
    sides = [oracle.side(document[name]) for name in ("sequences", "context")]
    allowed = oracle.visible(*sides)[:, 0]
    assert [mask["block_counts"] for mask in document["masks"]] == allowed.astype(int).tolist()


@pytest.mark.parametrize(("length", "block"), [(256, 1), (257, 2), (1000, 4)])
def test_blocks_of_a_long_mask_add_up_to_its_cells(length: int, block: int, mha: Any) -> None:
    words = [
        "--random",
        f"1,{length}",
        *"--mask --causal --window 37 --sink-window 2 --json".split(),
    ]
    (mask,) = mha("trace", *words).json["masks"]
    i, j = np.indices((length, length))
    allowed = (j <= i) & ((j >= i - 37) | (j < 2))
    assert mask["block"] == block
    assert mask["visible_per_query"] == allowed.sum(axis=1).tolist()
    edges = [*range(0, length, block), length]
    sums = [[int(allowed[a:b, c:d].sum()) for c, d in pairwise(edges)] for a, b in pairwise(edges)]
    assert mask["block_counts"] == sums


def test_a_mask_of_more_cells_than_anyone_waits_for_is_refused(mha: Any) -> None:
    ended = mha("trace", "--random", "43,20000", "--mask", "--causal", "--json", code=1)
    assert f"{43 * 20_000**2:,}" in ended.said


def test_a_trace_computes_what_a_run_computes(mha: Any, tmp_path: Path) -> None:
    for route in ROUTES:
        document = traced(
            mha, "--route", route, "--keep", "pattern,z", "--save-weights", "w.st", "--force"
        )
        right = expected(document, weights_of(tmp_path / "w.st"))
        require_near(document["pattern"], right.layer.attention.pattern, 1e-12)
        require_near(document["z"], right.layer.attention.z, 1e-12)


def test_a_cell_shows_no_number_where_there_is_none(tmp_path: Path) -> None:
    run(
        tmp_path,
        "run",
        "a b c",
        *"--heads 1 --d-model 4 --save-weights w.st --view none".split(),
    )
    with safe_open(tmp_path / "w.st", "pt") as file:
        weights, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    weights["k_proj.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "w.st", metadata)
    shown = run(
        tmp_path, "trace", "a b c", "--weights", "w.st", "--cell", "0,1,1", "--allow-nonfinite"
    ).stdout
    rows = [line.replace("→", "").split() for line in shown.splitlines()]
    (first,) = (number for number, words in enumerate(rows) if words[:2] == ["key", "score"])
    assert [words[-3:] for words in rows[first + 1 : first + 5]] == [["nan"] * 3] * 3 + [
        ["sum", "nan", "nan"]
    ]
    assert "−∞" not in shown


def test_the_sum_of_a_long_row_counts_the_visible_keys(mha: Any) -> None:
    words = ("--random", "1,90", "--causal", "--d-model", "8", "--heads", "2", "--cell", "0,60,3")
    assert " 61 visible keys" in mha("trace", *words).stdout
