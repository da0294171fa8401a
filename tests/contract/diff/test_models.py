"""`mhacli.diff(model_a, model_b, inputs)`: the first place where two models part, known because one
thing was changed.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import checkpoints, some
from torch import nn
from torch.nn import functional as F

import mhacli

IDS = torch.randint(3, 300, (1, 13), generator=torch.Generator().manual_seed(1))
LAYER, ATTENTION, BERT_LAYER = (
    "model.layers.1.",
    "model.layers.1.self_attn.",
    "bert.encoder.layer.1.",
)
ENCODER, DECODER = "encoder.block.1.layer.", "decoder.block.1.layer."
GROUPED = {
    f"{LAYER}input_layernorm": ("attention", "norm"),
    f"{ATTENTION}q_proj": ("attention", "q"),
    f"{ATTENTION}k_proj": ("attention", "k"),
    f"{ATTENTION}v_proj": ("attention", "v"),
    f"{ATTENTION}o_proj": ("attention", "output"),
    f"{LAYER}mlp.up_proj": ("mlp", "output"),
    "model.norm": ("norm", "norm"),
    "model.embed_tokens": ("embedding", "lookup"),
    "lm_head": ("logits", "logits"),
}
PRE_NORM = {f"{LAYER}post_attention_layernorm": ("mlp", "norm")}
PLACES: dict[str, dict[str, tuple[str, str]]] = {
    "llama": GROUPED | PRE_NORM,
    "qwen3": GROUPED
    | PRE_NORM
    | {
        f"{ATTENTION}q_norm": ("attention", "q_norm"),
        f"{ATTENTION}k_norm": ("attention", "k_norm"),
    },
    "gemma2": {
        name: place
        for name, place in GROUPED.items()
        if name not in ("lm_head", "model.embed_tokens")
    }
    | {
        f"{LAYER}post_attention_layernorm": ("attention", "output_norm"),
        f"{LAYER}pre_feedforward_layernorm": ("mlp", "norm"),
        f"{LAYER}post_feedforward_layernorm": ("mlp", "output_norm"),
    },
    "gpt2": {
        "transformer.wpe": ("embedding", "lookup"),
        "transformer.h.1.ln_1": ("attention", "norm"),
        "transformer.h.1.attn.c_attn": ("attention", "q"),
        "transformer.h.1.attn.c_proj": ("attention", "output"),
        "transformer.h.1.ln_2": ("mlp", "norm"),
        "transformer.h.1.mlp.c_fc": ("mlp", "output"),
        "transformer.ln_f": ("norm", "norm"),
    },
    "bert": {
        "bert.embeddings.LayerNorm": ("embedding", "embedding"),
        f"{BERT_LAYER}attention.self.query": ("attention", "q"),
        f"{BERT_LAYER}attention.self.key": ("attention", "k"),
        f"{BERT_LAYER}attention.self.value": ("attention", "v"),
        f"{BERT_LAYER}attention.output.dense": ("attention", "output"),
        f"{BERT_LAYER}attention.output.LayerNorm": ("attention", "output_norm"),
        f"{BERT_LAYER}intermediate.dense": ("mlp", "output"),
        f"{BERT_LAYER}output.LayerNorm": ("mlp", "output_norm"),
        "cls.predictions.transform.dense": ("logits", "head"),
    },
    "t5": {
        f"{ENCODER}0.layer_norm": ("attention", "norm"),
        f"{ENCODER}0.SelfAttention.q": ("attention", "q"),
        f"{ENCODER}0.SelfAttention.o": ("attention", "output"),
        f"{ENCODER}1.layer_norm": ("mlp", "norm"),
        f"{DECODER}1.EncDecAttention.k": ("attention", "k"),
        f"{DECODER}1.layer_norm": ("attention", "norm"),
        f"{DECODER}2.DenseReluDense.wi": ("mlp", "output"),
        "encoder.final_layer_norm": ("norm", "norm"),
        "decoder.final_layer_norm": ("norm", "norm"),
    },
}
"""The place of each module with weights, in layer 1 or outside of the layers."""
COMMON = [("llama", "eager"), ("llama", "bfloat16"), ("t5", "same")]
"""Families, and what rounds otherwise, that are run by default: others are of the same kind."""
MORE_PLACES = {"codegen": {"transformer.h.1.attn.qkv_proj": ("attention", "q")}}


def inputs_of(family: str) -> dict[str, Any]:
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :7]} if family == "t5" else {})


def first(document: Any) -> tuple[Any, ...] | None:
    """The layer, the part and the site of the first place that parts."""
    place = document["first"]
    return place and (place["layer"], place["part"], place["site"])


@pytest.mark.parametrize("family", some(PLACES | MORE_PLACES, default=["llama"]))
def test_one_changed_weight_is_found_in_its_place(family: str) -> None:
    model = checkpoints.model(family)
    for module, (part, site) in (PLACES | MORE_PLACES)[family].items():
        changed = copy.deepcopy(model)
        weight = changed.get_submodule(module).weight
        row = int(IDS[0, 3]) if module == "model.embed_tokens" else 3 if weight.ndim > 1 else ...
        weight[row] += 0.7
        document = mhacli.diff(model, changed, inputs_of(family))
        assert first(document) == (1 if "1." in module else None, part, site), module
        is_cross = "DecAttention" in module or "decoder.block.1.layer.1" in module
        stack = "cross" if is_cross else module.partition(".")[0]
        assert document["first"]["stack"] == (stack if family == "t5" else None), module


def test_a_difference_without_a_size_has_no_number() -> None:
    model = checkpoints.model("llama")
    changed = copy.deepcopy(model)
    changed.get_submodule(f"{LAYER}input_layernorm").weight[3] = torch.inf
    place = mhacli.diff(model, changed, inputs_of("llama"))["first"]
    assert (place["site"], place["beyond"]) == ("norm", True)
    assert (place["relative"], place["largest"]) == (None, None)
    assert place["at"] is not None


def test_a_difference_whose_square_is_0_counts() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    nn.init.zeros_(model[0].weight)
    changed = copy.deepcopy(model)
    nn.init.constant_(changed[0].weight, 1e-30)
    sizes = [place["largest"] for place in mhacli.diff(model, changed, IDS % 9)["places"]]
    assert 0.0 < max(sizes) < 2e-30


@pytest.mark.parametrize(
    ("family", "what"),
    [
        pytest.param(family, what, marks=() if (family, what) in COMMON else pytest.mark.real)
        for family in PLACES
        for what in ("same", "eager", "bfloat16", "float16", "float64")
    ],
)
def test_models_that_differ_by_rounding_alone_agree(family: str, what: str) -> None:
    model = checkpoints.model(family)
    other = copy.deepcopy(model)
    if what == "eager":
        other.set_attn_implementation("eager")
    elif what != "same":
        other = other.to(getattr(torch, what))
    document = mhacli.diff(other, model, inputs_of(family))
    assert (document["verdict"], document["first"], document["unmatched"]) == ("agree", None, [])
    assert what != "same" or not any(place["relative"] for place in document["places"])


@pytest.mark.parametrize("family", some(PLACES, default=["llama"]))
def test_another_rotation_scale_or_epsilon_is_found(family: str) -> None:
    model = checkpoints.model(family)
    for what in ("rotation", "scale", "epsilon"):
        other = copy.deepcopy(model)
        for module in other.modules():
            if what == "rotation" and hasattr(module, "inv_freq"):
                module.inv_freq.mul_(0.9)
            names = {"scale": ("scaling", "scale"), "epsilon": ("eps", "variance_epsilon")}.get(
                what, ()
            )
            for name in names:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, getattr(module, name) * 1.3 if what == "scale" else 0.1)
        if what == "rotation" and not hasattr(model, "model"):
            continue
        found = first(mhacli.diff(model, other, inputs_of(family)))
        expected = {
            "rotation": (0, "attention", "q_rotated"),
            "scale": (0, "attention", "scores"),
            "epsilon": (None, "embedding", "embedding")
            if family == "bert"
            else (0, "attention", "norm"),
        }
        assert found == expected[what], what


def test_the_heads_of_a_changed_projection_are_named() -> None:
    model = checkpoints.model("llama")
    changed = copy.deepcopy(model)
    changed.get_submodule(f"{ATTENTION}q_proj").weight[5 * 8 + 1] += (
        1.0  # the second of 8 numbers of head 5
    )
    document = mhacli.diff(model, changed, inputs_of("llama"))
    assert (document["first"]["site"], document["first"]["head"]) == ("q", 5)
    of_layer = {
        place["site"]: place
        for place in document["places"]
        if place["layer"] == 1 and place["part"] == "attention"
    }
    assert of_layer["q"]["heads"] == of_layer["scores"]["heads"] == of_layer["z"]["heads"] == [5]
    assert not of_layer["k"]["beyond"]
    assert json.loads(json.dumps(document))["first"] == document["first"]


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_compared_with_one_on_the_cpu() -> None:
    model = checkpoints.model("llama")
    other = copy.deepcopy(model).to("cuda")
    assert mhacli.diff(other, model, inputs_of("llama"))["verdict"] == "agree"
    other.get_submodule(f"{ATTENTION}k_proj").weight[9] += 1.0
    assert first(mhacli.diff(model, other, inputs_of("llama"))) == (1, "attention", "k")


# -------------------------------------------------------------------------- a port of GPT-2 by hand


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int, mistake: str, *, by_hand: bool) -> None:
        super().__init__()
        self.n_heads, self.mistake, self.by_hand = n_heads, mistake, by_hand
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scale = 1.0 if self.mistake == "scale" else 1 / math.sqrt(k.shape[-1])
        if not self.by_hand:
            z = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.mistake != "mask", scale=scale
            )
        else:
            n = x.shape[1]
            hidden = torch.ones(n, n).triu(diagonal=2 if self.mistake == "mask" else 1).bool()
            z = torch.softmax((q @ k.mT * scale).masked_fill(hidden, -math.inf), dim=-1) @ v
        return self.out(z.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, mistake: str, *, by_hand: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, n_heads, mistake, by_hand=by_hand)
        act = nn.GELU() if mistake == "gelu" else nn.GELU(approximate="tanh")
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), act, nn.Linear(4 * width, width))
        self.norm_after = mistake == "norm"

    def forward(self, x: torch.Tensor) -> Any:
        if self.norm_after:
            x = self.first(x + self.attention(x))
            return self.second(x + self.ff(x))
        x = x + self.attention(self.first(x))
        return x + self.ff(self.second(x))


class Port(nn.Module):
    """GPT-2 with the weights of transformers' one, and a mistake."""

    def __init__(
        self, of: Any, mistake: str = "", *, by_hand: bool = False, last: bool = False
    ) -> None:
        super().__init__()
        c, self.mistake, self.last = of.config, mistake, last
        self.words, self.places = (
            nn.Embedding(c.vocab_size, c.n_embd),
            nn.Embedding(c.n_positions, c.n_embd),
        )
        self.blocks = nn.ModuleList(
            Block(c.n_embd, c.n_head, mistake, by_hand=by_hand) for _ in range(c.n_layer)
        )
        self.end, self.to_words = (
            nn.LayerNorm(c.n_embd),
            nn.Linear(c.n_embd, c.vocab_size, bias=False),
        )
        state = of.state_dict()
        names = {
            "transformer.wte": "words",
            "transformer.wpe": "places",
            "transformer.ln_f": "end",
            "lm_head": "to_words",
        }
        for n in range(c.n_layer):
            parts = {
                "ln_1": "first",
                "ln_2": "second",
                "attn.c_attn": "attention.qkv",
                "attn.c_proj": "attention.out",
                "mlp.c_fc": "ff.0",
                "mlp.c_proj": "ff.2",
            }
            names |= {
                f"transformer.h.{n}.{theirs}": f"blocks.{n}.{ours}"
                for theirs, ours in parts.items()
            }
        for theirs, ours in names.items():
            for name, parameter in self.get_submodule(ours).named_parameters():
                given = state[f"{theirs}.{name}"]
                turned = given.T if ".c_" in theirs and given.ndim > 1 else given
                if mistake == "transposed" and "c_attn" in theirs and given.ndim > 1:
                    turned = given.reshape(turned.shape)
                parameter.data.copy_(turned)
        self.eval()

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids) + self.places(
            torch.arange(ids.shape[1]) + (self.mistake == "positions")
        )
        for block in self.blocks:
            x = block(x)
        return self.to_words(self.end(x)[:, -1:] if self.last else self.end(x))


class Grouped(nn.Module):
    """Attention of 8 query heads that share 2 kv heads, repeated head by head, or all at once."""

    def __init__(self, *, tiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.tiled = nn.Embedding(9, 32), tiled
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(32, n) for n in (32, 8, 8, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        q, k, v = (
            project(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for project in (self.w_q, self.w_k, self.w_v)
        )
        k, v = (
            each.repeat(1, 4, 1, 1) if self.tiled else each.repeat_interleave(4, dim=1)
            for each in (k, v)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.w_o(z.transpose(1, 2).flatten(2))


def test_repeated_keys_have_query_heads_and_those_that_are_shared_kv_heads() -> None:
    models = Grouped(tiled=False), Grouped(tiled=True)
    document = mhacli.diff(*models, torch.tensor([[3, 5, 7]]))
    assert (document["first"]["site"], document["first"]["heads"]) == ("k_rotated", [1, 3, 4, 6])
    places = {place["site"]: place for place in document["places"]}
    assert places["k"]["of_kv_heads"]
    assert not places["k_rotated"]["of_kv_heads"]
    assert "repeated" in document["summary"]
    assert (document.ok, mhacli.diff(models[0], models[0], torch.tensor([[3]])).ok) == (False, True)


@pytest.mark.parametrize("by_hand", [pytest.param(True, marks=pytest.mark.real), False])
@pytest.mark.parametrize(
    ("mistake", "place"),
    [
        ("", None),
        ("transposed", (0, "attention", "q")),
        ("scale", (0, "attention", "scores")),
        ("mask", (0, "attention", "pattern")),
        ("gelu", (0, "mlp", "output")),
        ("norm", (0, "attention", "q")),
        ("positions", (None, "embedding", "lookup")),
    ],
)
def test_a_port_parts_where_its_mistake_is(mistake: str, place: Any, by_hand: bool) -> None:
    model = checkpoints.model("gpt2")
    document = mhacli.diff(model, Port(model, mistake, by_hand=by_hand), IDS)
    assert first(document) == place
    words = {
        "scale": "scale",
        "mask": "mask",
        "gelu": "activation",
        "norm": "only A has it",
        "positions": "positions",
    }
    assert words.get(mistake, "") in document["summary"]
    assert document["first"] is None or document["first"]["name_b"] in dict(
        Port(model).named_modules()
    )
    assert document["summary"] in repr(document)
    assert document["summary"][:20] in document._repr_html_()


def test_logits_of_the_last_position_alone_are_compared_with_the_last() -> None:
    model = checkpoints.model("gpt2")
    port = Port(model, last=True)
    document = mhacli.diff(model, port, {"input_ids": IDS})
    assert document["first"] is None
    assert any("logits" in note for note in document["notes"])
    port.to_words.weight.data[7] += 1.0
    assert first(mhacli.diff(port, model, IDS)) == (None, "logits", "logits")


@pytest.mark.parametrize(
    "families", [("gpt2", "llama"), pytest.param(("gpt2", "bert"), marks=pytest.mark.real)]
)
def test_no_place_is_both_compared_and_not_compared(families: tuple[str, str]) -> None:
    document = mhacli.diff(*map(checkpoints.model, families), {"input_ids": IDS})
    names = ("stack", "layer", "part", "site", "number")
    compared, others = (
        {tuple(place[name] for name in names) for place in document[kind]}
        for kind in ("places", "unmatched")
    )
    assert others
    assert not compared & others
    assert len(compared) == len(document["places"])


def test_of_two_forms_that_fit_a_name_the_longest_counts(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    words = model[0](torch.arange(8)).detach()
    save_file({"ffn.words": words, "ffn": model[1](words).detach()}, tmp_path / "b.safetensors")
    forms = ["0=ffn.words", "1=ffn"]
    found = mhacli.diff(model, tmp_path / "b.safetensors", torch.arange(8)[None], map=forms)
    assert found.verdict == "agree"


def test_models_of_other_sizes_are_compared_as_far_as_they_fit() -> None:
    sizes = [{**checkpoints.GPT, "n_head": n, "n_layer": n} for n in (2, 3)]
    model, other = (
        checkpoints.from_config("gpt2", size, automatic="AutoModelForCausalLM") for size in sizes
    )
    document = mhacli.diff(model, other, IDS)
    assert {"A has 2 layers and B 3", "A has 2 heads and B 3"} <= {*document["notes"]}
    assert any(
        "[1, 2, 13, 24]" in place["why"] and "[1, 3, 13, 16]" in place["why"]
        for place in document["unmatched"]
    )
    with pytest.raises(mhacli.MhaError, match="shape"):
        mhacli.diff(nn.Linear(3, 4), nn.Linear(3, 5), torch.ones(2, 3))
    shorter = copy.deepcopy(model)
    del shorter.transformer.h[1]
    assert "1 layer could not be compared" in mhacli.diff(model, shorter, IDS)["summary"]


def test_models_in_training_with_gradients_are_left_as_they_are() -> None:
    model = copy.deepcopy(checkpoints.model("llama")).train()
    before = copy.deepcopy(model.state_dict())
    assert mhacli.diff(model, checkpoints.model("llama"), IDS)["first"] is None
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "inputs", [{"input_ids": IDS, "nonsense": 1}, torch.ones(1, 3), {"input_ids": IDS + 10_000}]
)
def test_inputs_that_a_model_does_not_take_are_an_error(inputs: Any) -> None:
    model = checkpoints.model("gpt2")
    with pytest.raises(mhacli.MhaError):
        mhacli.diff(model, Port(model), inputs)
    with pytest.raises(mhacli.MhaError, match="two records, or two models"):
        mhacli.diff("a.safetensors", model, IDS)


class Wrapped(nn.Module):
    """Another class around a model of transformers: its logits, or the last of them, or its last
    hidden states.
    """

    def __init__(self, model: Any, gives: str) -> None:
        super().__init__()
        self.model, self.gives = model, gives

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.gives == "hidden":
            return self.model.model(input_ids).last_hidden_state
        return (
            self.model(input_ids).logits[:, -1:]
            if self.gives == "last"
            else self.model(input_ids).logits
        )


def test_rounding_of_16_bits_hides_no_rotation_of_another_class() -> None:
    model = copy.deepcopy(checkpoints.model("llama"))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= (
            0.05  # nearly uniform weights, which no rotation changes much
        )
    other = copy.deepcopy(model)
    other.model.rotary_emb.inv_freq *= 3
    document = mhacli.diff(model.bfloat16(), Wrapped(other.bfloat16(), "all"), IDS)
    assert first(document) == (0, "attention", "q_rotated")


def test_the_last_logits_say_nothing_about_other_tokens_and_hidden_states_are_no_logits() -> None:
    model = checkpoints.model("llama")
    other = copy.deepcopy(model)
    last = other.model.layers[-1]
    last.mlp.register_forward_hook(
        lambda part, inputs, out: out + torch.eye(out.shape[1])[0][:, None]
    )
    assert first(mhacli.diff(model, Wrapped(other, "last"), IDS)) == (
        len(other.model.layers) - 1,
        "mlp",
        "output",
    )
    document = mhacli.diff(model, Wrapped(model, "hidden"), IDS)
    assert document["verdict"] == "agree"
    assert [place["part"] for place in document["unmatched"]] == ["logits"]


# -------------------------------------------------------------------------------------- the command


TEXT = "the cat sat on the mat"
PORT = Path(__file__).parents[3] / "sample_texts" / "my_port.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint, and one with another weight in layer 1."""
    folder = tmp_path_factory.mktemp("models")
    paths = [str(checkpoints.copy_of("llama", folder / name)) for name in ("a", "b")]
    checkpoints.change(
        Path(paths[1]), lambda weights: weights[f"{ATTENTION}k_proj.weight"][9].add_(1.0)
    )
    return paths[0], paths[1]


@pytest.mark.real
def test_two_checkpoints_are_compared_over_a_text(mha: Any, folders: Any) -> None:
    ended = mha("diff", *folders, TEXT, "--json", code=3)
    assert first(ended.json) == (1, "attention", "k")
    assert ended.json["first"]["head"] == 1
    assert (ended.json["a"], ended.json["ids"]) == (folders[0], None)
    shown = mha("diff", *folders, TEXT, code=3).stdout
    assert " ".join(shown.split()).endswith(ended.json["summary"])
    rows = mha("diff", *folders, TEXT, "--csv", code=3).stdout.splitlines()
    assert len(rows) == 1 + len(ended.json["places"])


@pytest.mark.parametrize(
    "width",
    [80, pytest.param(120, marks=pytest.mark.real), pytest.param(200, marks=pytest.mark.real)],
)
def test_no_name_above_the_grid_of_places_is_broken(mha: Any, width: int) -> None:
    folders = map(checkpoints.folder, ("llama", "gpt2"))
    ended = mha("diff", *folders, "--ids", "3,4,5", code=3, env={"COLUMNS": str(width)})
    lines = ended.stdout.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.startswith("layer "))
    assert len(lines[heading].split()) == 14
    assert lines[heading + 1].startswith("0 ")


@pytest.mark.real
@pytest.mark.parametrize(
    "words",
    [
        (TEXT, "--dtype-b", "bfloat16", "--one-at-a-time"),
        ("--ids", "5,7,9", "--attn-b", "eager"),
    ],
    ids=["dtype", "kernel"],
)
def test_a_checkpoint_computed_in_two_ways_has_no_first_difference(
    mha: Any, folders: Any, words: tuple[str, ...]
) -> None:
    assert first(mha("diff", folders[0], folders[0], *words, "--json").json) is None


@pytest.mark.real
def test_a_model_is_saved_and_compared_later(mha: Any, folders: Any) -> None:
    for folder, name in zip(folders, ("a.safetensors", "b.safetensors"), strict=True):
        mha("diff", folder, TEXT, "--save", name)
    whole = mha("diff", *folders, TEXT, "--json", code=3).json
    for a, b in (
        ("a.safetensors", folders[1]),
        (folders[0], "b.safetensors"),
        ("a.safetensors", "b.safetensors"),
    ):
        document = mha("diff", a, b, "--json", code=3).json
        assert (document["first"], document["places"]) == (whole["first"], whole["places"])
    assert mha("diff", "a.safetensors", "a.safetensors", "--json").json["verdict"] == "agree"
    assert mha("diff", "a.safetensors", folders[1], TEXT, code=2).error
    assert mha("diff", folders[0], TEXT, "--save", "a.safetensors", code=1).error


@pytest.mark.real
def test_code_is_compared_with_code_and_with_a_checkpoint(mha: Any) -> None:
    code, run = (
        (f"{PORT}:theirs", f"{PORT}:ours"),
        functools.partial(mha, code=3),
    )
    assert first(run("diff", *code, TEXT, "--tokenizer", "byte", "--json").json) == (
        0,
        "attention",
        "scores",
    )
    modules = "transformer.h.{i}.mlp.c_fc=h.{i}.mlp.c_fc"
    call = ("--ids", "1,2,3", "--example-b", "lambda m, ids: m(ids)", "--map", modules)
    places = run("diff", *code, *call, "--json").json["places"]
    assert {place["name_b"] for place in places if "mapped" in place["site"]} == {
        f"h.{n}.mlp.c_fc" for n in range(3)
    }
    document = run("diff", checkpoints.folder("gpt2"), code[1], "--ids", "3,5", "--json").json
    assert document["first"]["part"] == "embedding"


def test_other_ids_of_two_tokenizers_are_the_answer(mha: Any, folders: Any) -> None:
    words = ("diff", folders[0], checkpoints.folder("gpt2"))
    document = mha(*words, TEXT, "--json", code=3).json
    assert (document["verdict"], document["first"], document["places"]) == ("differ", None, [])
    assert document["ids"][0] != document["ids"][1]
    verdict = mha(*words, TEXT, code=3).stdout.rpartition("\n\n")[2]
    assert verdict.startswith("the two tokenizers give other ids")
    assert mha(*words, "--ids", "5,7,9", "--json", code=3).json["first"]["part"] == "embedding"


@pytest.mark.parametrize(
    ("words", "code", "mentions"),
    [
        ("A B", 2, "text"),
        ("A nowhere/at/all TEXT", 1, "nowhere"),
        ("A ./nope TEXT", 1, "./nope"),
        ("A B TEXT TEXT", 2, "one text"),
        ("A B TEXT --tolerance 1", 2, "--tolerance"),
        ("RECORD A TEXT", 1, "record"),
        ("RECORD RECORD TEXT", 2, "without a text"),
        ("A B --ids 5,99999", 2, "99999"),
        ("A B TEXT --attn nonsense", 2, "nonsense"),
        ("A B TEXT --map x.{i}=y.{i}", 2, "x.0"),
        (f"GPT GPT --ids {'5,' * 64}5", 1, "64 positions"),
        ("A B TEXT --ids 3", 2, "--ids"),
        ("A nope.py:GPT TEXT", 1, "nope.py"),
        ("A", 2, "two things"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    mha: Any, folders: Any, words: str, code: int, mentions: str
) -> None:
    if "RECORD" in words:
        mha("run", TEXT, "--save", "record.safetensors")
    gpt = checkpoints.folder("gpt2")
    known = {
        "A": folders[0],
        "B": folders[1],
        "TEXT": TEXT,
        "RECORD": "record.safetensors",
        "GPT": gpt,
    }
    ended = mha("diff", *(known.get(word, word) for word in words.split()), "--json", code=code)
    assert mentions in ended.said


@pytest.mark.parametrize(
    ("words", "code", "mentions", "lacks"),
    [
        ("FILE FILE TEXT", 2, "--ids", "--arg"),
        ("FILE FILE --ids 3,55", 1, "39", "config.json"),
        ("FILE FILE --ids 3,5 --arg-b nothing=3", 1, "--arg-b nothing", "constructor"),
        ("VECTORS VECTORS --ids 3,5", 1, "mhacli.diff", "config.json"),
        ("bench.json bench.json", 1, "records, models or arrays", "--file"),
    ],
)
def test_the_hint_for_code_and_json_is_what_works_there(
    mha: Any, tmp_path: Path, words: str, code: int, mentions: str, lacks: str
) -> None:
    lines = [
        "from torch import nn",
        "def ids(): return nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40))",
        "def vectors(): return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 40))",
    ]
    (tmp_path / "small.py").write_text("\n".join(lines))
    (tmp_path / "bench.json").write_text('{"schema": "mha.bench/1"}')
    known = {"FILE": "small.py:ids", "VECTORS": "small.py:vectors", "TEXT": TEXT}
    ended = mha("diff", *(known.get(word, word) for word in words.split()), code=code)
    assert mentions in ended.said
    assert lacks not in ended.said


class Mean(nn.Module):
    """A model that gives one number, of a layer that is also called without tokens."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(9, 8), nn.Linear(8, 8)
        nn.init.constant_(self.layer.bias, bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        self.layer(x[:, :0])
        return self.layer(x).mean()


@pytest.mark.parametrize(("bias", "verdict"), [(0.0, "agree"), (1.0, "differ")])
def test_an_output_of_one_number_is_compared(bias: float, verdict: str) -> None:
    found = mhacli.diff(Mean(0.0), Mean(bias), torch.arange(8)[None])
    assert found.verdict == verdict
