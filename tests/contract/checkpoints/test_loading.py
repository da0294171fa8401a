"""A checkpoint is loaded as transformers loads it, from any of its layouts on disk, onto any
device; `weights info` counts it.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import checkpoints, some
from support.checkpoints import FAMILIES, N_HEADS, N_LAYERS, TEXT, VOCABULARY

import mhacli


def rows(mha: Any, place: Path | str, *words: str) -> list[list[float]]:
    """The entropies of the heads of a text, and other means."""
    document = mha("heads", "--model", place, TEXT, *words, "--json").json
    assert document["self_check"]["ok"]
    return [
        [head[name] for name in ("entropy", "distance", "sink", "max_score")]
        for head in document["heads"]
    ]


def saved(name: str, place: Path, model: Any = None, **choices: Any) -> Path:
    """A checkpoint of a model with the tokenizer of a family."""
    with checkpoints.quiet():
        (model or checkpoints.model(name)).save_pretrained(place, **choices)
        checkpoints.tokenizer_of(name).save_pretrained(place)
    return place


# -------------------------------------------------------------------------------------- on the disk


def sharded(name: str, tmp: Path) -> Path:
    place = saved(name, tmp / "m", max_shard_size="40KB")
    assert len([*place.glob("*.safetensors")]) > 3
    return place


def in_a_cache(name: str, tmp: Path) -> Path:
    """The layout of a hub's cache: every file is a link to a blob."""
    blobs, place = (
        tmp / "models--org--m" / "blobs",
        tmp / "models--org--m" / "snapshots" / "0123abcd",
    )
    blobs.mkdir(parents=True)
    place.mkdir(parents=True)
    for number, path in enumerate(sorted(checkpoints.folder(name).iterdir())):
        (blobs / f"{number}").write_bytes(path.read_bytes())
        (place / path.name).symlink_to(f"../../blobs/{number}")
    return place


def linked(name: str, tmp: Path) -> Path:
    (tmp / "m").symlink_to(checkpoints.copy_of(name, tmp / "real"), target_is_directory=True)
    return tmp / "m"


def with_more_tensors(name: str, tmp: Path) -> Path:
    more = {
        "model.layers.9.extra.weight": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    return checkpoints.change(
        checkpoints.copy_of(name, tmp / "m"), lambda tensors: tensors.update(more)
    )


def without_its_head(name: str, tmp: Path) -> Path:
    return saved(name, tmp / "m", checkpoints.model(name, "AutoModel"))


LAYOUTS = {
    "shards": sharded,
    "cache": in_a_cache,
    "link": linked,
    "more tensors": with_more_tensors,
    "no head": without_its_head,
}


@pytest.mark.parametrize(
    "layout", some(LAYOUTS, default=set(LAYOUTS) - {"more tensors", "no head"})
)
def test_a_checkpoint_has_the_same_numbers_in_any_layout(
    layout: str, mha: Any, tmp_path: Path
) -> None:
    place = LAYOUTS[layout]("llama", tmp_path)
    assert rows(mha, f"{place}/") == rows(mha, checkpoints.folder("llama"))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.real)])
def test_weights_of_16_bits_stay_in_their_dtype_until_another_is_chosen(
    dtype: str, mha: Any, tmp_path: Path
) -> None:
    narrow = copy.deepcopy(checkpoints.model("llama")).to(getattr(torch, dtype))
    saved("llama", tmp_path / "m", narrow)
    plain, wide = (
        mha("heads", "--model", "m", TEXT, *words, "--json").json
        for words in ((), ("--dtype", "float32"))
    )
    assert [document["model"]["dtype"] for document in (plain, wide)] == [dtype, "float32"]
    theirs = checkpoints.load(tmp_path / "m", checkpoints.CAUSAL, dtype="float32")
    with mhacli.inspecting(theirs) as seen, torch.no_grad():
        theirs(**checkpoints.tokenizer_of("llama")(TEXT, return_tensors="pt"))
    expected = [head.entropy for head in seen.record.heads]
    assert [head["entropy"] for head in wide["heads"]] == pytest.approx(expected, abs=1e-6)
    assert [head["entropy"] for head in plain["heads"]] == pytest.approx(expected, abs=0.05)
    (counted,) = mha("weights", "info", "m", "--json").json["dtypes"]
    assert counted["dtype"] == {"bfloat16": "BF16", "float16": "F16"}[dtype]


def test_a_part_that_no_attention_depends_on_may_be_missing_and_is_a_note(
    mha: Any, tmp_path: Path
) -> None:
    place = saved("bert", tmp_path / "m", checkpoints.from_config("bert", FAMILIES["bert"].config))
    checkpoints.change(
        place,
        lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("pooler.")],
    )
    ended = mha("heads", "--model", "m", TEXT, "--json")
    assert ended.json["self_check"]["ok"]
    assert "pooler.dense.weight" in ended.stderr


def test_tables_of_positions_that_a_family_computes_are_in_no_file(
    mha: Any, tmp_path: Path
) -> None:
    made = checkpoints.from_config(
        "marian", {**checkpoints.BART, "max_position_embeddings": 64}, automatic=checkpoints.PAIR
    )
    place = saved("bart", tmp_path / "m", made)
    encoder = checkpoints.load(place, checkpoints.PAIR, attn_implementation="eager").get_encoder()
    ids = torch.tensor([checkpoints.tokenizer_of("bart")(TEXT)["input_ids"]])
    with torch.no_grad():
        pattern = encoder(ids, output_attentions=True).attentions[1][0]
    expected = -(pattern * pattern.log()).sum(dim=-1).mean(dim=-1)
    assert [row[0] for row in rows(mha, place, "--layer", "encoder.1")] == pytest.approx(
        expected.tolist(), abs=1e-5
    )


def test_without_a_language_head_nothing_is_generated(mha: Any, tmp_path: Path) -> None:
    saved("bert", tmp_path / "m", checkpoints.from_config("bert", FAMILIES["bert"].config))
    ended = mha("run", "--model", "m", TEXT, "--generate", "2", "--json", code=1)
    assert ended.missing("cls.predictions.bias", "head") == []


def test_scores_that_overflow_are_of_the_heads_of_one_attention(mha: Any, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    checkpoints.change(
        checkpoints.copy_of("llama", tmp_path / "m"),
        lambda tensors: tensors[name].fill_(1e38),
    )
    ended = mha("heads", "--model", "m", TEXT, "--json", code=1)
    assert ended.error["code"] == "not-finite"
    heads = ", ".join(str(head) for head in range(N_HEADS))
    assert f"head {heads} of layers.1.self_attn" in ended.said.replace("model.layers", "layers")


def test_weights_that_are_not_finite_need_an_option(mha: Any, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    checkpoints.change(
        checkpoints.copy_of("llama", tmp_path / "m"),
        lambda tensors: tensors[name].view(-1)[[7, 48]].fill_(0),
    )

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name][3, 7] = tensors[name][5, 0] = torch.nan

    checkpoints.change(tmp_path / "m", spoil)
    ended = mha("heads", "--model", "m", TEXT, "--json", code=1)
    assert ended.error["code"] == "not-finite"
    for piece in (name.removeprefix("model."), "2", "[3, 7]", "--allow-nonfinite"):
        assert piece in ended.said
    document = mha(
        "heads", "--model", "m", TEXT, "--allow-nonfinite", "--layer", "0", "--json", code=(0, 3)
    ).json
    assert document["heads"][0]["entropy"] == pytest.approx(
        rows(mha, checkpoints.folder("llama"))[0][0]
    )


def test_a_nested_config_and_a_model_that_may_see_pictures_read_text_alone(
    mha: Any, tmp_path: Path
) -> None:
    tower = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = {
        "vision_config": {**tower, "image_size": 16, "patch_size": 8},
        "text_config": {**FAMILIES["llama"].config, "model_type": "llama"},
        "image_token_id": 98,
    }
    saved("llama", tmp_path / "m", checkpoints.from_config("idefics3", config))
    document = mha("run", "--model", "m", TEXT, "--json").json
    assert [layer["n_heads"] for layer in document["layers"]] == [N_HEADS] * N_LAYERS
    twin = checkpoints.load(tmp_path / "m", "AutoModel", attn_implementation="eager")
    with torch.no_grad():
        theirs = twin(
            input_ids=torch.tensor([document["sequences"][0]["ids"]]), output_attentions=True
        ).attentions
    for layer, pattern in zip(document["layers"], theirs, strict=True):
        assert np.abs(np.array(layer["pattern"]) - pattern.numpy()).max() < 1e-5


@pytest.mark.parametrize("command", ["run", "heads", "trace", "decode"])
def test_what_a_part_of_the_model_raises_is_named(command: str, mha: Any, tmp_path: Path) -> None:
    """A router that is to choose more experts than there are, which only the pass notices."""
    place = checkpoints.copy_of("gpt_oss", tmp_path / "m")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 99}))
    ended = mha(command, "--model", "m", TEXT, "--json", code=1)
    assert ended.error["code"] == "model-failed"
    assert "layers.0.mlp.router" in ended.said


@pytest.mark.real
@pytest.mark.parametrize("command", ["run", "decode"])
def test_without_transformers_the_command_that_installs_it_is_named(command: str, mha: Any) -> None:
    modules = {
        "transformers": (
            "raise ModuleNotFoundError(\"No module named 'transformers'\", name='transformers')\n"
        )
    }
    ended = mha(
        command, "--model", checkpoints.folder("gpt2"), TEXT, "--json", code=1, modules=modules
    )
    assert ended.error["code"] == "missing-extra"
    assert ended.missing("pip install", "transformers") == []


# ------------------------------------------------------------------ a model that was really trained

SENTENCE = (
    "The quick brown fox jumps over the lazy dog because it was chasing a rabbit, and the dog did"
    " not mind."
)


@pytest.mark.real
def test_a_trained_model_has_the_patterns_and_heads_that_it_is_known_for(mha: Any) -> None:
    document = mha(
        "run", "--model", checkpoints.minilm(), SENTENCE, "--verify-outputs", "--json"
    ).json
    (sequence,), model = document["sequences"], document["model"]
    assert (model["family"], model["n_layers"], model["n_parameters"]) == ("bert", 6, 22_713_216)
    assert model["identical_outputs"]
    assert all(layer["verified"] for layer in document["layers"])
    assert sequence["tokens"][:5] == ["[CLS]", "the", "quick", "brown", "fox"]
    assert [SENTENCE[a:b] for a, b in sequence["offsets"][1:4]] == ["The", "quick", "brown"]
    with torch.no_grad():
        twin = checkpoints.load(checkpoints.minilm(), "AutoModel", attn_implementation="eager")
        theirs = twin(torch.tensor([sequence["ids"]]), output_attentions=True).attentions
    for layer, pattern in zip(document["layers"], theirs, strict=True):
        assert np.abs(np.array(layer["pattern"]) - pattern.numpy()).max() < 2e-6
    heads = {(head["layer"], head["head"]): head for head in document["heads"]}
    assert heads[0, 2]["kind"] == "previous-token"
    assert heads[0, 2]["previous"] > 0.95  # the first token has none before it
    assert heads[0, 2]["entropy_share"] < 0.01
    assert heads[1, 8]["offset"] == 1
    first = [np.mean([heads[layer, head]["sink"] for head in range(12)]) for layer in range(6)]
    assert np.abs(np.array(first) - [0.154, 0.489, 0.520, 0.440, 0.570, 0.283]).max() < 1e-3


@pytest.mark.real
def test_padding_and_truncation_that_a_tokenizer_brings_are_off(mha: Any) -> None:
    texts = ("three short words", "word " * 200)
    words = ("heads", "--model", checkpoints.minilm(), *texts, "--layer", "0", "--json")
    document = mha(*words).json
    assert document["sequences"][0]["tokens"] == ["[CLS]", "three", "short", "words", "[SEP]"]
    assert len(document["sequences"][1]["ids"]) == 202


# ---------------------------------------------------------------------------------- several devices

PARTS = {
    "embed_tokens": "cpu",
    "layers.0": "disk",
    "layers.1": "cpu",
    "layers.2": "disk",
    "norm": "disk",
    "rotary_emb": "cpu",
}
MIXED = {f"model.{part}": place for part, place in PARTS.items()} | {"lm_head": "disk"}


def spread(tmp: Path, device_map: Mapping[str, str]) -> tuple[str, str]:
    (tmp / "map.json").write_text(json.dumps(device_map))
    return "--device-map", "map.json"


def near(value: Any) -> Any:
    """What equals a document whose numbers were summed in another order, as weights read from a
    file may be.
    """
    if isinstance(value, dict):
        return {name: near(part) for name, part in value.items()}
    if isinstance(value, list):
        return [near(part) for part in value]
    return pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value


WITHOUT_POOLER = pytest.mark.xfail(
    strict=True, reason="a pooler that the checkpoint lacks is looked for among its tensors on disk"
)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "device_map", "places"),
    [
        ("llama", MIXED, ["cpu", "disk"]),
        ("llama", {"": "cpu"}, []),
        ("gpt2", {"": "disk"}, ["disk"]),
        *(
            pytest.param(name, {"": "disk"}, ["disk"], marks=pytest.mark.real)
            for name in ("gpt_oss", "t5", "mixtral")
        ),
        pytest.param("bert", {"": "disk"}, ["disk"], marks=[pytest.mark.real, WITHOUT_POOLER]),
    ],
)
def test_a_model_in_several_places_has_the_numbers_of_one_in_memory(
    name: str, device_map: Any, places: list[str], mha: Any, tmp_path: Path
) -> None:
    words = ("run", "--model", checkpoints.folder(name), TEXT, "--json")
    ended, whole = mha(*words, *spread(tmp_path, device_map)), mha(*words).json
    for layer, of_whole in zip(ended.json["layers"], whole["layers"], strict=True):
        assert layer == near(of_whole | {"survey": layer["survey"]})
    assert ended.json["heads"] == near(whole["heads"])
    assert ended.json["environment"]["device"] == "cpu"
    assert [place for place in places if place not in ended.stderr] == []
    # nothing is left of the weights on disk
    assert [path.name for path in tmp_path.iterdir() if path.name != "map.json"] == []


def test_auto_places_a_small_model_in_memory(mha: Any) -> None:
    words = ("--device-map", "auto")
    assert rows(mha, checkpoints.folder("llama"), *words) == rows(mha, checkpoints.folder("llama"))


@pytest.mark.real
def test_what_a_spread_model_generates_is_inspected(mha: Any, tmp_path: Path) -> None:
    words = ("heads", "--model", checkpoints.folder("llama"), TEXT, "--generate", "3", "--json")
    actual, whole = mha(*words, *spread(tmp_path, MIXED)).json, mha(*words).json
    assert actual["sequences"] == whole["sequences"]
    assert actual["heads"] == whole["heads"]


def test_a_model_in_memory_with_offloaded_weights_is_inspected(tmp_path: Path) -> None:
    ids, records = torch.arange(3, 12)[None], []
    choices = {"device_map": MIXED, "offload_folder": str(tmp_path)}
    for model in (checkpoints.model("llama"), checkpoints.model("llama", **choices)):
        with mhacli.inspecting(model, keep=("pattern", "z")) as seen, torch.no_grad():
            model(input_ids=ids)
        records.append(seen.record)
    assert [head.entropy for head in records[0].heads] == [
        head.entropy for head in records[1].heads
    ]
    assert np.array_equal(records[0].arrays["layers.2.z"], records[1].arrays["layers.2.z"])


@pytest.mark.parametrize(
    ("device_map", "mentions"),
    [
        ({**MIXED, "model.layers.9": "cpu"}, ("layers.9",)),
        ({name: place for name, place in MIXED.items() if "norm" not in name}, ("norm.weight",)),
        ({"": "cuda:77"}, ("cuda:77",)),
        ({"": "cpu", "lm_head": "disk"}, ("map.json",)),
        ({"lm_head": "cuda:x"}, ("lm_head", "cuda:x")),
        ({}, ("map.json",)),
    ],
    ids=[
        "a module too many",
        "a module too few",
        "no such device",
        "all and parts",
        "no device",
        "empty",
    ],
)
def test_a_map_that_does_not_fit_the_model_is_refused(
    device_map: Any, mentions: tuple[str, ...], mha: Any, tmp_path: Path
) -> None:
    words = ("run", "--model", checkpoints.folder("llama"), TEXT)
    ended = mha(*words, *spread(tmp_path, device_map), "--json", code=(1, 2))
    assert ended.missing(*mentions) == []


# ----------------------------------------------------------------------------------- `weights info`


@pytest.mark.parametrize(
    "name", ["gpt2", "mistral", "bert", "t5", pytest.param("gemma2", marks=pytest.mark.real)]
)
def test_info_counts_the_tensors_and_names_the_sizes_of_the_config(name: str, mha: Any) -> None:
    place, family = checkpoints.folder(name), FAMILIES[name]
    info, tensors = (
        mha("weights", "info", place, "--json").json,
        load_file(place / "model.safetensors"),
    )
    assert info["schema"] == "mha.weights-info/1"
    assert mha("weights", place, "--json").json == info
    assert (info["kind"], info["family"], info["vocabulary"]) == (
        "checkpoint",
        family.kind,
        VOCABULARY,
    )
    assert info["n_tensors"] == len(tensors)
    assert info["n_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert info["n_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert [each["dtype"] for each in info["dtypes"]] == ["F32"]
    assert info["files"] == [
        {"name": "model.safetensors", "n_bytes": os.path.getsize(place / "model.safetensors")}
    ]
    assert info["positions"] == family.config.get(
        "n_positions", family.config.get("max_position_embeddings", info["positions"])
    )
    for attention in info["attentions"]:
        assert attention["n_layers"] == (2 if name == "t5" else N_LAYERS)
        assert (attention["n_heads"], attention["n_kv_heads"], attention["d_model"]) == (
            N_HEADS,
            family.n_kv_heads,
            48,
        )
        assert attention["d_head"] == family.config.get("head_dim", 8)
    token = 2 * family.n_kv_heads * family.config.get("head_dim", 8) * 4
    caches = {attention["stack"]: attention["cache_bytes"] for attention in info["attentions"]}
    assert set(caches) == ({"encoder", "decoder", "cross"} if name == "t5" else {"self"})
    stack = "decoder" if name == "t5" else "self"
    assert caches[stack] == (None if name == "bert" else token * (2 if name == "t5" else N_LAYERS))


def test_info_counts_shards_and_leaves_out_what_is_no_weight(mha: Any, tmp_path: Path) -> None:
    place = sharded("llama", tmp_path)
    info = mha("weights", "info", "m", "--json").json
    files = {path.name: path.stat().st_size for path in place.glob("*.safetensors")}
    assert {file["name"]: file["n_bytes"] for file in info["files"]} == files
    n = sum(p.numel() for p in checkpoints.model("llama").parameters())
    assert info["n_parameters"] == n
    more = with_more_tensors("llama", tmp_path / "other")
    # angles of a rotation are no parameters
    assert mha("weights", "info", more, "--json").json["n_parameters"] == n + 3


def test_info_of_a_saved_record_names_the_command_that_shows_it(mha: Any) -> None:
    mha("run", "the cat", "--save", "r.safetensors")
    ended = mha("weights", "info", "r.safetensors", "--json", code=1)
    assert "mha show" in ended.said


def test_a_model_of_one_layer_with_one_head_is_read(mha: Any, tmp_path: Path) -> None:
    place = checkpoints.copy_of("gpt2", tmp_path / "small", n_head=1, n_layer=1)
    document = mha("run", "the cat", "--model", place, "--json").json
    assert len(document["layers"]) == 1
    assert np.array(document["layers"][0]["pattern"]).shape[:2] == (1, 1)
