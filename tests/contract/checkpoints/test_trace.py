"""`mha trace --model` walks through one attention of a checkpoint: its tensors in their order, and
one cell of its pattern.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints, oracle, some
from support.checkpoints import FAMILIES, N_HEADS, PAD_ID, TEXT, WINDOW

CONTEXT = "a dog on the mat"
SCORED = ("q", "k", "v", "qk", "scores", "pattern", "z")
MASKED = ("q", "k", "v", "qk", "mask", "scores", "pattern", "z")
SINKS = ("q", "k", "v", "qk", "mask", "sinks", "scores", "pattern", "z")
OF_T5 = ("layer_norm", "SelfAttention.q", "SelfAttention.k", "SelfAttention.v")
WALKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "gpt2": ("transformer.h.1.attn", ("c_attn",), SCORED, ("c_proj",)),
    "llama": ("model.layers.1.self_attn", ("q_proj", "k_proj", "v_proj"), SCORED, ("o_proj",)),
    "gpt_neox": ("gpt_neox.layers.1.attention", ("query_key_value",), SCORED, ("dense",)),
    "modernbert": ("model.layers.1.attn", ("Wqkv",), MASKED, ("Wo",)),
    "bert": (
        "bert.encoder.layer.1.attention",
        ("self.query", "self.key", "self.value"),
        SCORED,
        ("output.dense", "output.LayerNorm"),
    ),
    "gpt_oss": ("model.layers.1.self_attn", ("q_proj", "k_proj", "v_proj"), SINKS, ("o_proj",)),
    "bloom": (
        "transformer.h.1.self_attention",
        ("query_key_value",),
        ("scores", "pattern", "z"),
        ("dense",),
    ),
    "t5 encoder": ("encoder.block.1.layer.0", OF_T5, SCORED, ("SelfAttention.o",)),
    "t5 decoder": ("decoder.block.1.layer.0", OF_T5, SCORED, ("SelfAttention.o",)),
    "t5 cross": ("decoder.block.1.layer.1.EncDecAttention", ("q", "k", "v"), SCORED, ("o",)),
}
"""Where layer 1 is in the model with its head, and the steps before, inside and after its
attention."""
REAL = some(WALKS, default=("gpt2", "llama", "gpt_oss", "t5 cross"))


def inputs(name: str) -> dict[str, torch.Tensor]:
    """What the commands give the model."""
    tokenizer = checkpoints.tokenizer_of(name)
    row = torch.tensor([tokenizer(TEXT, add_special_tokens=name != "t5")["input_ids"]])
    if name != "t5":
        return {"input_ids": row}
    context = torch.tensor([tokenizer(CONTEXT)["input_ids"]])
    return {
        "input_ids": context,
        "decoder_input_ids": torch.cat([torch.tensor([[PAD_ID]]), row], dim=1),
    }


def walk(mha: Any, case: str, *words: str, **choices: Any) -> Any:
    """`mha trace` of layer 1."""
    name, _, kind = case.partition(" ")
    model = ("--model", checkpoints.folder(name))
    if kind:
        place = ("--context", CONTEXT, "--layer", f"{kind}.1")
    else:
        place = ("--layer", "1")
    return mha("trace", *model, TEXT, *place, *words, "--json", **choices)


@torch.no_grad()
def parts(case: str) -> dict[str, Any]:
    """What enters the attention (`x`), and what each of its parts gives, by its path."""
    name, outputs = case.partition(" ")[0], {}
    model, root = checkpoints.model(name), WALKS[case][0]
    top = model.get_submodule(root)

    def enter(_: Any, given: Any, keywords: Any) -> None:
        outputs["x"] = given[0] if given else keywords["hidden_states"]

    handles = [top.register_forward_pre_hook(enter, with_kwargs=True)]
    for path, module in top.named_modules():
        if not list(module.children()) and path in (*WALKS[case][1], *WALKS[case][3]):
            handles.append(
                module.register_forward_hook(
                    lambda _m, _i, out, path=path: outputs.update({path: out})
                )
            )
    model(**inputs(name), use_cache=False) if hasattr(model.config, "use_cache") else model(
        **inputs(name)
    )
    for handle in handles:
        handle.remove()
    return outputs


@torch.no_grad()
def pattern_of(case: str) -> np.ndarray:
    """The pattern of layer 1 as transformers returns it."""
    name, _, kind = case.partition(" ")
    outputs = checkpoints.model(name, attn_implementation="eager")(
        **inputs(name), output_attentions=True
    )
    patterns = getattr(outputs, f"{kind}_attentions") if kind else outputs.attentions
    return patterns[1].double().numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", REAL)
def test_steps_come_in_order_with_the_shapes_numbers_and_costs_of_the_model(
    case: str, mha: Any
) -> None:
    _, before, inside, after = WALKS[case]
    document = walk(mha, case, "--values").json
    steps = {step["site"]: step for step in document["trace"]}
    projections = {step["site"]: step for step in document["trace"] if step["parameters"]}
    assert [step["site"] for step in document["trace"]] == ["x", *before, *inside, *after]
    modules, pattern = parts(case), pattern_of(case)
    for site, tensor in (*modules.items(), ("pattern", torch.from_numpy(pattern))):
        step = projections.get(site, steps[site])
        values = step["values"]
        assert step["shape"] == list(tensor.shape), site
        actual = [values["min"], values["max"], values["mean"], values["std"]]
        numbers = tensor.double()
        expected = [numbers.min(), numbers.max(), numbers.mean(), numbers.std(correction=0)]
        assert actual == pytest.approx([float(number) for number in expected], abs=5e-5), site
    family, n_queries, n_keys = FAMILIES[case.partition(" ")[0]], *pattern.shape[2:]
    d_head = family.config.get("head_dim", 8)
    for site in ("q", "z"):
        assert site not in steps or steps[site]["shape"] == [1, N_HEADS, n_queries, d_head]
    for site in ("k", "v"):
        assert site not in steps or steps[site]["shape"] == [1, family.n_kv_heads, n_keys, d_head]
    assert steps["scores"]["shape"] == [1, N_HEADS, n_queries, n_keys]
    assert steps["z"]["flops"] == 2 * N_HEADS * n_queries * n_keys * d_head
    for path, (root, *_) in (
        (path, WALKS[case]) for path in (*before, *after) if "orm" not in path
    ):
        module: Any = checkpoints.model(case.partition(" ")[0]).get_submodule(f"{root}.{path}")
        rows = n_keys if case == "t5 cross" and path in ("k", "v") else n_queries
        sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
        assert projections[path]["flops"] == rows * (2 * sizes["weight"] + sizes.get("bias", 0))
        shapes = {
            parameter["name"].rpartition(".")[2]: parameter["shape"]
            for parameter in projections[path]["parameters"]
        }
        assert shapes == {
            name: list(parameter.shape) for name, parameter in module.named_parameters()
        }


def test_a_record_of_a_walk_is_of_that_layer_alone_and_without_a_choice_of_the_first(
    mha: Any,
) -> None:
    words = ("trace", "--model", checkpoints.folder("gpt2"), TEXT, "--json")
    document, other = mha(*words).json, mha(*words, "--layer", "2").json
    assert [layer["name"] for layer in document["layers"]] == ["h.0.attn"]
    assert {head["layer"] for head in other["heads"]} == {2}
    assert [step["values"] for step in document["trace"]] == [None] * 10
    assert document["cell"] is None


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_a_cell_is_followed_from_the_rows_that_enter_to_the_result(case: str, mha: Any) -> None:
    head, i, j = 4, 8, 5
    cell = walk(mha, case, "--cell", f"{head},{i},{j}").json["cell"]
    x, module = (
        parts(case)["x"][0].double().numpy(),
        checkpoints.model(case).get_submodule(WALKS[case][0]),
    )
    if case == "gpt2":
        made = x @ module.c_attn.weight.double().numpy() + module.c_attn.bias.double().numpy()
        q, k, v = (made[:, 48 * part + 8 * head :][:, :8] for part in range(3))
    else:
        q, k, v = (
            x @ getattr(module, f"{part}_proj").weight.double().numpy()[8 * part_head :][:8].T
            for part, part_head in (("q", head), ("k", head // 3), ("v", head // 3))
        )
        base = checkpoints.model(case).config.rope_parameters["rope_theta"]
        places = np.arange(len(x))[None]
        q, k = (oracle.rotated(rows[None, None], places, theta=base)[0, 0] for rows in (q, k))
    scores = k[: i + 1] @ q[i] / math.sqrt(8)
    weights = oracle.softmax(scores)
    assert (cell["sequence"], cell["head"], cell["query"], cell["key"], cell["allowed"]) == (
        0,
        head,
        i,
        j,
        True,
    )
    for name, number in (
        ("q", q[i]),
        ("k", k[j]),
        ("v", v[j]),
        ("qk", q[i] @ k[j]),
        ("scale", 8**-0.5),
        ("score", scores[j]),
        ("share", weights[j]),
        ("z", weights @ v[: i + 1]),
    ):
        assert cell[name] == pytest.approx(number, abs=5e-5), name
    n_later = len(x) - i - 1
    assert cell["scores_row"][: i + 1] == pytest.approx(scores, abs=5e-5)
    assert cell["scores_row"][i + 1 :] == [None] * n_later
    assert cell["pattern_row"] == pytest.approx([*weights, *[0] * n_later], abs=5e-5)


@pytest.mark.parametrize(
    "case",
    some(("gpt_oss", "t5 decoder", "t5 cross", "modernbert"), default=("gpt_oss", "t5 cross")),
)
def test_a_cell_of_any_family_adds_up_and_is_the_familys_own(case: str, mha: Any) -> None:
    head, i, j = 2, 8, 5
    cell, row = (
        walk(mha, case, "--cell", f"{head},{i},{j}").json["cell"],
        pattern_of(case)[0, head, i],
    )
    assert cell["pattern_row"] == pytest.approx(row, abs=5e-5)
    assert cell["share"] == cell["pattern_row"][j]
    assert cell["score"] == cell["scores_row"][j]
    assert cell["qk"] == pytest.approx(np.dot(cell["q"], cell["k"]), abs=5e-5)
    added = sum(part["value"] for part in cell["parts"])
    assert cell["score"] == pytest.approx(cell["scale"] * cell["qk"] + added, abs=5e-5)
    assert bool(cell["parts"]) == (case == "t5 decoder")
    for other, score in enumerate(cell["scores_row"]):
        if score is not None:  # a sink takes its part of all of them
            expected = cell["share"] * math.exp(score - cell["score"])
            assert cell["pattern_row"][other] == pytest.approx(expected, abs=5e-5)


def test_a_layer_without_rotation_is_not_called_rotated(mha: Any, tmp_path: Path) -> None:
    config = {
        **checkpoints.GROUPED,
        "no_rope_layers": [1, 0, 1],
        "layer_types": ["full_attention"] * 3,
    }
    checkpoints.from_config("smollm3", config, automatic=checkpoints.CAUSAL).save_pretrained(
        tmp_path / "m"
    )
    checkpoints.tokenizer_of("llama").save_pretrained(tmp_path / "m")
    for layer in range(3):
        trace = mha("trace", "--model", "m", TEXT, "--layer", str(layer), "--json").json["trace"]
        assert [layer != 1] * 2 == [
            "rotated" in step["formula"] for step in trace if step["site"] in ("q", "k")
        ]


@pytest.mark.parametrize(("name", "query", "key"), [("gpt2", 3, 9), ("mistral", 9, 9 - WINDOW)])
def test_a_cell_that_is_not_allowed_has_no_score_and_no_weight(
    name: str, query: int, key: int, mha: Any
) -> None:
    cell = mha(
        "trace", "--model", checkpoints.folder(name), TEXT, "--cell", f"0,{query},{key}", "--json"
    ).json["cell"]
    assert (cell["allowed"], cell["score"], cell["share"]) == (False, None, 0)


def test_places_of_a_text_padded_on_the_left_count_its_own_tokens(mha: Any) -> None:
    words = (
        "trace",
        "--model",
        checkpoints.folder("llama"),
        *"--layer 1 --cell 2,3,1 --json".split(),
    )
    padded = mha(*words, TEXT, "the mat", "--padding", "left", "--sequence", "1").json["cell"]
    alone = mha(*words, "the mat").json["cell"]
    for name in ("pattern_row", "q", "k", "v", "z"):
        assert padded[name] == pytest.approx(alone[name], abs=5e-5), name
    assert (padded["sequence"], alone["sequence"]) == (1, 0)


@pytest.mark.parametrize(
    ("case", "cell", "mentions"),
    [
        ("gpt2", "0,23,0", ("23", "22")),
        ("gpt2", "0,0,23", ("23", "22")),
        ("t5 cross", "0,0,99", ("99", "key")),
        ("bloom", "0,0,0", ("--cell", "softmax")),
    ],
)
def test_a_cell_that_does_not_exist_or_was_not_captured_is_refused(
    case: str, cell: str, mentions: Any, mha: Any
) -> None:
    ended = walk(mha, case, "--cell", cell, code=2)
    assert ended.missing(*mentions) == []
