"""`mha run` and `mha heads` of a checkpoint: the numbers of its own tokenizer and attention,
whatever is chosen of them.
"""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints, oracle, some
from support.checkpoints import (
    BEGIN_ID,
    END_ID,
    FAMILIES,
    N_HALF,
    N_HEADS,
    N_LAYERS,
    N_POSITIONS,
    OF_TEXT,
    PAD_ID,
    STORY,
    TEXT,
    VOCABULARY,
)

import mhacli

SHORT = "the mat"
AT_PUSH = ("gpt2", "mistral", "bert")
"""Families whose padding is tested by default."""
TOLERANCE = {"t5": 5e-5, "electra": 2e-5, "albert": 2e-5}
N_NEW = 4


@functools.cache
def ids(name: str, text: str, *, special: bool = True) -> list[int]:
    """The ids of a text by the tokenizer as transformers holds it."""
    return list(checkpoints.tokenizer_of(name)(text, add_special_tokens=special)["input_ids"])


@torch.no_grad()
def eager(name: str, **keywords: Sequence[int]) -> Any:
    """What transformers returns of one text with `eager` and `output_attentions`."""
    model = checkpoints.model(name, attn_implementation="eager")
    cached = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return model(
        **{key: torch.tensor([row]) for key, row in keywords.items()},
        **cached,
        output_attentions=True,
    )


def likeliest(
    place: Path, known: Sequence[int], n: int, *, encoder: Sequence[int] = (), end: int = END_ID
) -> list[int]:
    """`n` more tokens, each the one with the largest logit of a pass over all before it; the one
    that ends is the last.
    """
    model = checkpoints.load(place, "AutoModelForSeq2SeqLM" if encoder else "AutoModelForCausalLM")
    row = list(known)
    while len(row) < len(known) + n and row[len(known) :][-1:] != [end]:
        read = {"input_ids": torch.tensor([encoder]), "decoder_input_ids": torch.tensor([row])}
        with torch.no_grad():
            outputs = model(
                **(read if encoder else {"input_ids": torch.tensor([row])}), use_cache=False
            )
        row.append(int(outputs.logits[0, -1].argmax()))
    return row[len(known) :]


def columns(side: str, length: int, longest: int) -> slice:
    """Where a text stands among those of a batch."""
    return slice(longest - length, longest) if side == "left" else slice(length)


# -------------------------------------------------------------------------------------- the numbers

LEFT = ("gpt2", "llama", "bloom", "gemma2", "opt", "falcon", "roberta", "gptj", "mpt", "qwen3")
PADDED = [
    pytest.param(
        name,
        side,
        marks=() if name in AT_PUSH and (name, side) != ("gpt2", "right") else pytest.mark.real,
    )
    for name in OF_TEXT
    for side in (["left"] if name in LEFT and name != "llama" else ["right"])
]


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_each_text_of_a_batch_has_the_pattern_that_it_has_alone(
    name: str, side: str, mha: Any
) -> None:
    texts = (SHORT, TEXT)
    options = ("--padding", side, "--json", "--keep", "pattern,z")
    words = ("run", "--model", checkpoints.folder(name), *texts, *options)
    document = mha(*words, "--verify-outputs").json
    rows = [ids(name, text) for text in texts]
    assert [sequence["ids"] for sequence in document["sequences"]] == rows
    assert document["self_check"]["ok"]
    assert document["model"]["identical_outputs"]
    assert all(layer["verified"] for layer in document["layers"])
    longest = max(map(len, rows))
    queries = np.zeros((2, longest), dtype=bool)
    for number, row in enumerate(rows):
        place = columns(side, len(row), longest)
        queries[number, place] = True
        model = checkpoints.model(name)
        with mhacli.inspecting(model, keep=("pattern", "z")) as seen, torch.no_grad():
            model(input_ids=torch.tensor([row]))
        exact = FAMILIES[name].eager_is_right
        patterns = (
            eager(name, input_ids=row).attentions if exact else [None] * len(document["layers"])
        )
        for index, layer in enumerate(document["layers"]):
            actual, alone = (
                np.array(layer["pattern"])[number],
                seen.record.arrays[f"layers.{index}.pattern"][0],
            )
            theirs = alone if patterns[index] is None else patterns[index][0].numpy()
            assert np.abs(actual[:, place, place] - theirs).max() < TOLERANCE.get(name, 5e-6)
            z = np.array(layer["z"])[number][:, place]
            assert np.abs(
                z - seen.record.arrays[f"layers.{index}.z"][0]
            ).max() < 10 * TOLERANCE.get(name, 5e-6)
            actual[:, place, place] = 0
            assert (actual == 0).all()
    if "learned_sink" in document["heads"][0] and document["heads"][0]["learned_sink"] is None:
        require_means(document, 1, side)


def require_means(document: Any, index: int, side: str) -> None:
    """The means of the heads of a layer are those over the queries that are tokens."""
    layer = document["layers"][index]
    pattern, tokens = np.array(layer["pattern"]), oracle.side(document["sequences"], side)
    visible = np.array(layer["visible"])[:, 0]
    real = tokens.real[:, :, None] & tokens.real[:, None, :]
    cells = real if layer["mask"] == "all keys" else (pattern[:, 0] > 0) & real
    assert (cells.sum(axis=-1) == visible).all() or layer["mask"] == "all keys"
    for head in (head for head in document["heads"] if head["layer"] == layer["layer"]):
        means = oracle.head_statistics(
            pattern[:, head["head"]], cells, oracle.marked(tokens, tokens), head["offset"]
        )
        names = "entropy entropy_share effective_keys distance sink previous duplicate near"
        for name in names.split():
            assert head[name] == pytest.approx(means[name], rel=2e-5, abs=2e-5), name


@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.real)])
def test_an_encoder_and_its_decoder_read_their_own_texts(name: str, mha: Any) -> None:
    texts = (SHORT, "a dog sat", "--context", "the cat", "--context", TEXT)
    words = ("run", "--model", checkpoints.folder(name), *texts)
    document = mha(*words, "--json", "--keep", "pattern").json
    start = FAMILIES[name].config["decoder_start_token_id"]
    contexts = [ids(name, text) for text in ("the cat", TEXT)]
    decoder = [[start, *ids(name, text, special=False)] for text in (SHORT, "a dog sat")]
    assert [text["ids"] for text in document["context"]] == contexts
    assert [text["ids"] for text in document["sequences"]] == decoder
    for number, (context, row) in enumerate(zip(contexts, decoder, strict=True)):
        outputs = eager(name, input_ids=context, decoder_input_ids=row)
        each = {
            "encoder": outputs.encoder_attentions,
            "decoder": outputs.decoder_attentions,
            "cross": outputs.cross_attentions,
        }
        for layer in document["layers"]:
            actual = np.array(layer["pattern"])[number]
            theirs = each[layer["kind"]][layer["layer"]][0].numpy()
            n_queries, n_keys = theirs.shape[1:]
            assert np.abs(actual[:, :n_queries, :n_keys] - theirs).max() < 5e-5
            assert (actual[:, n_queries:] == 0).all()
            assert (actual[:, :, n_keys:] == 0).all()
    assert len(document["layers"]) == 6


@pytest.mark.real
def test_kept_cells_of_a_pair_are_those_of_every_kind_of_layer(mha: Any) -> None:
    words = (SHORT, "--context", TEXT, "--model", checkpoints.folder("t5"))
    layers = mha("heads", *words, "--query", "1", "--rows", "0:2", "--json").json["layers"]
    assert {layer["kind"] for layer in layers} == {"encoder", "decoder", "cross"}
    full = mha("run", *words, "--keep", "pattern", "--json").json["layers"]
    for layer, whole in zip(layers, full, strict=True):
        corner = np.array(layer["corner"], dtype=float)  # null where the mask forbids a cell
        assert np.allclose(
            np.nan_to_num(corner),
            np.array(whole["pattern"])[:, :, :2, : corner.shape[3]],
            atol=1e-5,
        )
        assert (
            np.array(layer["top_keys"])[:, :, 0, 0]
            == np.array(whole["pattern"])[:, :, 1].argmax(-1)
        ).all()


@pytest.mark.parametrize("name", some(("gpt2", "llama", "bert", "t5"), default=["gpt2"]))
def test_a_saved_run_has_the_bits_that_python_sees(name: str, mha: Any, tmp_path: Path) -> None:
    keep = ("pattern", "z", "scores", "qk")
    mha("run", "--model", checkpoints.folder(name), TEXT, "--keep", ",".join(keep), "--save", "r")
    expected, model = mhacli.load(str(tmp_path / "r")), checkpoints.model(name, "AutoModel")
    row = torch.tensor([ids(name, TEXT)])
    with (
        mhacli.inspecting(model, checkpoints.tokenizer_of(name), keep=keep) as seen,
        torch.no_grad(),
    ):
        model(
            input_ids=row,
            **({"decoder_input_ids": torch.tensor([[PAD_ID]])} if name == "t5" else {}),
        )
    assert seen.notes == ()
    assert seen.record.sequences == expected.sequences
    assert seen.record.context == expected.context
    assert seen.record.heads == expected.heads
    assert seen.record.arrays.keys() == expected.arrays.keys()
    for site, array in expected.arrays.items():
        assert np.array_equal(seen.record.arrays[site], array, equal_nan=True), site


def test_the_record_names_the_model_and_its_sizes(mha: Any) -> None:
    model = mha("run", "--model", checkpoints.folder("mistral"), TEXT, "--json").json["model"]
    theirs = checkpoints.model("mistral", "AutoModel")
    assert model["path"] == str(checkpoints.folder("mistral"))
    assert (model["family"], model["architecture"], model["dtype"]) == (
        "mistral",
        "MistralModel",
        "float32",
    )
    assert (model["n_layers"], model["n_vocabulary"]) == (N_LAYERS, VOCABULARY)
    assert model["n_parameters"] == sum(p.numel() for p in theirs.parameters())
    assert (model["implementation"], model["revision"], model["generated"]) == ("sdpa", None, None)


@pytest.mark.parametrize("dtype", some(("bfloat16", "float16", "float64"), default=["bfloat16"]))
def test_a_dtype_can_be_chosen_and_each_layer_is_verified_within_its_rounding(
    dtype: str, mha: Any
) -> None:
    document = mha(
        "run", "--model", checkpoints.folder("gemma2"), TEXT, "--dtype", dtype, "--json"
    ).json
    assert document["model"]["dtype"] == document["config"]["dtype"] == dtype
    assert all(layer["verified"] for layer in document["layers"])
    row = eager("gemma2", input_ids=ids("gemma2", TEXT)).attentions[0][0].numpy()
    rounding = {"bfloat16": 0.05, "float16": 0.005, "float64": 2e-6}[dtype]
    assert np.abs(np.array(document["layers"][0]["pattern"][0]) - row).max() < rounding


def test_the_csv_of_a_run_has_every_cell_of_every_layer(mha: Any) -> None:
    rows = list(
        csv.DictReader(
            StringIO(mha("run", "--model", checkpoints.folder("gpt2"), SHORT, "--csv").stdout)
        )
    )
    n, patterns = len(ids("gpt2", SHORT)), eager("gpt2", input_ids=ids("gpt2", SHORT)).attentions
    weights = np.array([float(row["pattern"]) for row in rows]).reshape(N_LAYERS, N_HEADS, n, n)
    assert np.abs(weights - torch.cat(patterns).numpy()).max() < 5e-6
    assert [int(row["layer"]) for row in rows] == sorted(int(row["layer"]) for row in rows)
    assert "".join(row["key_token"] for row in rows[:n]) == SHORT
    assert [row["allowed"] for row in rows[:3]] == ["1", "0", "0"]


def test_run_draws_the_numbers_of_a_chosen_head(mha: Any) -> None:
    words = ("--layer", "1", "--head", "2", "--precision", "3", "--all")
    lines = mha("run", "--model", checkpoints.folder("gpt2"), SHORT, *words).stdout.splitlines()
    last = eager("gpt2", input_ids=ids("gpt2", SHORT)).attentions[1][0, 2, -1]
    numbers = [f"{weight:.3f}".removeprefix("0") for weight in last]
    assert any(re.findall(r"\.\d{3}", line)[: len(numbers)] == numbers for line in lines)


# ----------------------------------------------------------------------------- what is chosen of it


@pytest.mark.parametrize(
    ("name", "choice", "layers"),
    [
        ("gpt2", ("--layer", "0,2"), [("self", 0), ("self", 2)]),
        ("t5", ("--layer", "cross.1,encoder.0"), [("encoder", 0), ("cross", 1)]),
        (
            "t5",
            ("--layer", "1,encoder.0-1"),
            [("encoder", 0), ("encoder", 1), ("decoder", 1), ("cross", 1)],
        ),
    ],
)
def test_layers_are_chosen_by_their_number_and_kind(
    name: str, choice: tuple[str, ...], layers: Any, mha: Any
) -> None:
    document = mha(
        "heads", "--model", checkpoints.folder(name), TEXT, *choice, "--head", "1,3", "--json"
    ).json
    assert [(layer["kind"], layer["layer"]) for layer in document["layers"]] == layers
    assert [head["head"] for head in document["heads"]] == [1, 3] * len(layers)
    assert {layer["pattern"] for layer in document["layers"]} == {None}


@pytest.mark.parametrize("reducer", ["torch", "c"])
def test_a_sink_logit_far_above_all_scores_gets_all_attention(
    reducer: str, mha: Any, tmp_path: Path
) -> None:
    def raise_sink(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.sinks"][2] = 92.0

    place = checkpoints.change(checkpoints.copy_of("gpt_oss", tmp_path / "m"), raise_sink)
    document = mha(
        "heads", "--model", place, TEXT, "--layer", "1", "--json", env={"MHA_BLOCK": reducer}
    ).json
    head = document["heads"][2]
    assert (head["learned_sink"], head["participation"]) == (1, 1)
    assert head["entropy"] == pytest.approx(0, abs=1e-30)


@pytest.mark.real
def test_a_head_alone_has_the_statistics_that_it_has_among_all(mha: Any) -> None:
    words = ("heads", "--model", checkpoints.folder("gpt_oss"), TEXT, "--json")
    alone = mha(*words, "--head", "4", "--layer", "1").json["heads"]
    (among,) = (h for h in mha(*words).json["heads"] if (h["layer"], h["head"]) == (1, 4))
    for name, value in among.items():
        if isinstance(value, (int, float)):
            assert alone[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_keep_chooses_what_is_written_and_the_limit_leaves_out_whole_layers(mha: Any) -> None:
    words, n = (
        ("run", "--model", checkpoints.folder("gpt2"), TEXT, "--json", "--keep"),
        len(ids("gpt2", TEXT)),
    )
    kept = mha(*words, "z,qk").json["layers"][0]
    assert np.shape(kept["z"]) == (1, N_HEADS, n, 8)
    assert (kept["pattern"], kept["scores"], kept["qk"] is None) == (None, None, False)
    ended = mha(*words, "pattern", "--keep-limit", str(int(4 * N_HEADS * n * n * 1.5)))
    assert [layer["pattern"] is None for layer in ended.json["layers"]] == [False, True, True]
    assert ended.json["not_kept"]
    assert "--keep-limit" in ended.stderr


def test_a_condition_counts_the_weights_of_its_cells(mha: Any) -> None:
    words = ("--where", "k == q - 2", "--where", "tok[k] == tok[q] and k < q")
    document = mha("heads", "--model", checkpoints.folder("llama"), TEXT, *words, "--json").json
    row = ids("llama", TEXT)
    patterns = torch.cat(eager("llama", input_ids=row).attentions).flatten(0, 1).double().numpy()
    same = np.array(
        [[row[k] == row[q] and k < q for k in range(len(row))] for q in range(len(row))]
    )
    for head, pattern in zip(document["heads"], patterns, strict=True):
        expected = [pattern.diagonal(-2).sum() / len(row), pattern[same].sum() / len(row)]
        assert head["patterns"] == pytest.approx(expected, abs=5e-6)


def test_weights_between_spans_are_sums_over_the_pattern_beside_the_uniform_ones(mha: Any) -> None:
    words = ("--span", "a=0:7", "--span", "b=/the/", "--span", "c=20:", "--padding", "left")
    texts = (TEXT, "a dog and the mat on the cat")
    document = mha("heads", "--model", checkpoints.folder("gpt_oss"), *texts, *words, "--json").json
    assert [span["name"] for span in document["spans"]] == ["a", "b", "c"]
    for number, text in enumerate(texts):
        spans = [
            touched(text, (0, 7)),
            touched(text, *((m.start(), m.end()) for m in re.finditer("the", text))),
            touched(text, (20, len(text))),
        ]
        assert [span["tokens"][number] for span in document["spans"]] == spans
        for layer, pattern in zip(
            document["layers"],
            eager("gpt_oss", input_ids=ids("gpt_oss", text)).attentions,
            strict=True,
        ):
            weights = pattern[0].double().numpy()
            even = oracle.uniform(weights > 0)
            for i, j in np.ndindex(3, 3):
                cells = (slice(None), *np.ix_(spans[i], spans[j]))
                actual = np.array(layer["span_mass"])[number][:, i, j]
                assert np.abs(actual - weights[cells].sum(axis=2).mean(axis=1)).max() < 5e-6
                uniform = np.array(layer["uniform_span_mass"])[number][0, i, j]
                assert uniform == pytest.approx(even[cells].sum(axis=2).mean(axis=1)[0], abs=5e-6)


def touched(text: str, *ranges: tuple[int, int]) -> list[int]:
    """The tokens that share a character with a range."""
    encoded = checkpoints.tokenizer_of("gpt2")(text, return_offsets_mapping=True)
    return [
        i
        for i, (a, b) in enumerate(encoded["offset_mapping"])
        if any(a < end and start < b for start, end in ranges)
    ]


@pytest.mark.real
def test_a_chat_is_rendered_by_the_template_and_its_roles_are_spans(
    mha: Any, tmp_path: Path
) -> None:
    chat = [
        ("system", "be the cat"),
        ("user", "on the mat?"),
        ("assistant", "yes"),
        ("user", "user"),
    ]
    for document in (
        [{"role": r, "content": c} for r, c in chat],
        {"messages": [{"role": r, "content": c} for r, c in chat]},
    ):
        (tmp_path / "chat.json").write_text(json.dumps(document))
        place = checkpoints.folder("gpt2", n_positions=128)
        actual = mha(
            "heads",
            "--model",
            place,
            *"--chat chat.json --span system,user --span user2 --json".split(),
        ).json
        rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in chat)
        assert actual["sequences"][0]["text"] == rendered
        assert actual["sequences"][0]["ids"] == ids("gpt2", rendered, special=False)
        starts = [rendered.index(f"{role}\n{content}") + len(role) + 1 for role, content in chat]
        ends = [start + len(content) for start, (_, content) in zip(starts, chat, strict=True)]
        places = [*zip(starts, ends, strict=True)]
        assert {span["name"]: span["tokens"][0] for span in actual["spans"]} == {
            "system": touched(rendered, places[0]),
            "user": touched(rendered, places[1], places[3]),
            "user2": touched(rendered, places[3]),
        }


TURNS = {
    "names of roles": (
        (
            "{% for m in messages %}<start>{{ 'model' if m.role[0] == 'a' else m.role }}\n{{"
            " m.content | trim }}<end>{% endfor %}"
        ),
        [
            ("<start>user\n", "INST user", "<end>"),
            ("<start>model\n", "model", "<end>"),
            ("<start>user\n", "e", "<end>"),
        ],
    ),
    "brackets": (
        (
            "{% for m in messages %}{{ '[INST] ' ~ m.content | trim ~ ' [/INST]' if m.role =="
            " 'user' else m.content }}{% endfor %}"
        ),
        [("[INST] ", "INST user", " [/INST]"), ("", "model", ""), ("[INST] ", "e", " [/INST]")],
    ),
}
"""Chat templates, and what stands before each content, the content, and what stands behind it."""


@pytest.mark.real
@pytest.mark.parametrize("template", TURNS)
def test_a_turn_is_where_the_template_puts_its_content(
    template: str, mha: Any, tmp_path: Path
) -> None:
    """Also where the template writes the same words around it."""
    place, (source, pieces) = (
        checkpoints.copy_of("gpt2", tmp_path / "m", n_positions=128),
        TURNS[template],
    )
    (place / "chat_template.jinja").write_text(source)
    contents = [("user", "INST user "), ("assistant", "model"), ("user", "e")]
    (tmp_path / "chat.json").write_text(
        json.dumps([{"role": role, "content": content} for role, content in contents])
    )
    actual = mha(
        "heads", "--model", "m", "--chat", "chat.json", "--span", "user1,assistant,user2", "--json"
    ).json
    text = "".join(map("".join, pieces))
    assert actual["sequences"][0]["text"] == text
    ends = np.cumsum([len("".join(turn)) for turn in pieces]) - [
        len(behind) for _, _, behind in pieces
    ]
    places = [
        (int(end) - len(content), int(end))
        for end, (_, content, _) in zip(ends, pieces, strict=True)
    ]
    assert [span["tokens"][0] for span in actual["spans"]] == [
        touched(text, where) for where in places
    ]


# --------------------------------------------------------------------------------- generated tokens


@pytest.mark.parametrize("name", some(("llama", "gpt2", "mistral"), default=["llama"]))
def test_what_is_generated_is_the_likeliest_token_each_time_and_is_inspected_too(
    name: str, mha: Any
) -> None:
    place, known = checkpoints.folder(name), ids(name, TEXT)
    document = mha("run", "--model", place, TEXT, "--generate", str(N_NEW), "--json").json
    row = known + likeliest(place, known, N_NEW)
    assert document["sequences"][0]["ids"] == row
    assert document["sequences"][0]["text"].startswith(TEXT)
    assert document["sequences"][0]["offsets"][len(known)][0] == len(TEXT)
    assert document["model"]["generated"] == {
        "prompt_lens": [len(known)],
        "n_tokens": N_NEW,
        "repeated": N_NEW,
    }
    for layer, pattern in zip(
        document["layers"], eager(name, input_ids=row).attentions, strict=True
    ):
        assert np.abs(np.array(layer["pattern"]) - pattern.numpy()).max() < 5e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 9.0},
        pytest.param(
            {
                "forced_bos_token_id": 77,
                "forced_eos_token_id": 78,
                "suppress_tokens": [*range(100, 200)],
            },
            marks=pytest.mark.real,
        ),
        pytest.param(
            {"num_return_sequences": 2, "num_beams": 4, "length_penalty": -2.0},
            marks=pytest.mark.real,
        ),
        pytest.param({"do_sample": True, "temperature": 5.0, "top_k": 0}, marks=pytest.mark.real),
        pytest.param(
            {"min_new_tokens": 9, "max_length": 3, "no_repeat_ngram_size": 1},
            marks=pytest.mark.real,
        ),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_a_checkpoint_brings_for_generation_change_nothing(
    settings: Any, mha: Any, tmp_path: Path
) -> None:
    place = checkpoints.copy_of("llama", tmp_path / "m")
    path = place / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    known = ids("llama", TEXT)
    document = mha("heads", "--model", "m", TEXT, "--generate", "6", "--json").json
    assert document["sequences"][0]["ids"] == known + likeliest(
        checkpoints.folder("llama"), known, 6
    )


def test_the_token_that_ends_a_text_is_the_last(mha: Any, tmp_path: Path) -> None:
    known = ids("llama", SHORT)
    free = likeliest(checkpoints.folder("llama"), known, 6)
    assert free[2] not in free[:2]
    place = checkpoints.copy_of("llama", tmp_path / "m")
    path = place / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": free[2]}))
    document = mha("heads", "--model", "m", SHORT, "--generate", "6", "--json").json
    assert document["sequences"][0]["ids"] == known + free[:3]
    assert document["model"]["generated"]["n_tokens"] == 3


@pytest.mark.real
def test_of_a_pair_the_decoder_goes_on(mha: Any) -> None:
    place, encoder = checkpoints.folder("t5"), ids("t5", TEXT)
    document = mha("heads", "--model", place, TEXT, "--generate", "5", "--json").json
    assert document["context"][0]["ids"] == encoder
    assert document["sequences"][0]["ids"] == [
        PAD_ID,
        *likeliest(place, [PAD_ID], 5, encoder=encoder),
    ]
    begun = [PAD_ID, *ids("t5", SHORT, special=False)]
    later = mha(
        "heads", "--model", place, SHORT, "--context", TEXT, "--generate", "3", "--json"
    ).json
    assert later["sequences"][0]["ids"] == [*begun, *likeliest(place, begun, 3, encoder=encoder)]


def test_generation_takes_one_text_and_needs_room(mha: Any) -> None:
    place, n = checkpoints.folder("gpt2"), len(ids("gpt2", TEXT))
    several = mha("run", "--model", place, TEXT, SHORT, "--generate", "3", code=2)
    assert "--generate" in several.said
    long = mha("run", "--model", place, TEXT, "--generate", str(N_POSITIONS), "--json", code=(1, 2))
    assert long.missing(str(N_POSITIONS), f"--generate {N_POSITIONS - n}") == []


# ---------------------------------------------------------------------------------------- the texts


def test_a_text_beyond_the_positions_of_the_model_is_refused_and_a_limit_takes_its_first_tokens(
    mha: Any,
) -> None:
    place, long = checkpoints.folder("gpt2"), STORY.read_text()[:400]
    row = ids("gpt2", long)
    refused = mha("run", "--model", place, TEXT, long, "--json", code=1)
    assert refused.error["code"] == "too-large"
    assert {str(len(row)), str(N_POSITIONS)} <= set(re.findall(r"\d+", refused.said))
    ended = mha("heads", "--model", place, TEXT, long, "--max-tokens", str(N_POSITIONS), "--json")
    assert [sequence["ids"] for sequence in ended.json["sequences"]] == [
        ids("gpt2", TEXT),
        row[:N_POSITIONS],
    ]
    assert "--max-tokens" in ended.stderr


@pytest.mark.real
def test_the_statistics_of_a_long_text_need_no_matrices(mha: Any, tmp_path: Path) -> None:
    """Two thousand tokens in one layer of a model with windows."""
    (tmp_path / "long.txt").write_text(STORY.read_text() * 2)
    words = "--file long.txt --max-tokens 1500 --layer 1 --head 2 --query 1499".split()
    document = mha("heads", "--model", checkpoints.folder("llama"), *words, "--json").json
    row = document["sequences"][0]["ids"]
    assert len(row) == 1500
    assert row == ids("llama", STORY.read_text() * 2)[:1500]
    pattern = eager("llama", input_ids=row).attentions[1][:, 2].double().numpy()
    (head,) = document["heads"]
    tokens = oracle.side(document["sequences"])
    means = oracle.head_statistics(
        pattern, np.tri(1500, dtype=bool)[None], oracle.marked(tokens, tokens), head["offset"]
    )
    for name, mean in means.items():
        assert head[name] == pytest.approx(mean, rel=2e-4, abs=2e-5), name


@pytest.mark.parametrize(
    ("text", "said"),
    [("<s>" + TEXT, "twice"), (TEXT, None)],
    ids=["beginning twice", "beginning once"],
)
def test_a_doubled_beginning_is_a_note(text: str, said: str | None, mha: Any) -> None:
    ended = mha("heads", "--model", checkpoints.folder("llama"), text, "--json")
    assert ended.json["sequences"][0]["ids"][:2].count(BEGIN_ID) == (1 if said is None else 2)
    assert ("<s>" in ended.stderr) == (said is not None)


def test_an_id_that_the_model_has_no_row_for_is_refused(mha: Any) -> None:
    place = checkpoints.folder("gpt2", vocab_size=280)
    largest = max(ids("gpt2", TEXT))
    assert largest >= 280
    ended = mha("heads", "--model", place, TEXT, "--json", code=(1, 2))
    assert ended.missing(str(largest), "280") == []
    assert mha("heads", "--model", place, "e", "--json").json["self_check"]["ok"]


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.real)])
def test_padding_outside_of_the_vocabulary_is_another_token_that_nobody_sees(
    side: str, mha: Any
) -> None:
    place = checkpoints.folder("gpt2", tokenizer={"pad_token": "<beyond>"})
    words = ("heads", TEXT, SHORT, "--padding", side, "--json")
    actual, usual = (
        mha(*words, "--model", folder).json for folder in (place, checkpoints.folder("gpt2"))
    )
    assert [head["entropy"] for head in actual["heads"]] == pytest.approx(
        [head["entropy"] for head in usual["heads"]]
    )


def test_hostile_tokens_of_a_vocabulary_are_shown_and_never_obeyed(
    mha: Any, tmp_path: Path
) -> None:
    shown = {
        "\x1b]52;c;aGk=\x07": "x1b]52",
        "\x1b[2J": "x1b[2J",
        "\x9b31m": "u009b31m",
        "[red]x[/b]": "[red]x[/b]",
        "\u202eevil": "u202eevil",
        "\u2066iso": "u2066iso",
        "\u200bzero": "u200bzero",
        "日本": "日本",
    }
    hostile = list(shown)
    place = checkpoints.copy_of("gpt2", tmp_path / "m")
    vocabulary = {word: i for i, word in enumerate(["?", *hostile])}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "text").write_text(" ".join(hostile))
    words = ("run", "--model", "m", "--file", "text")
    screen = mha(*words, "--layer", "0", "--head", "0", "--all").stdout
    assert [piece for piece in shown.values() if piece not in screen] == []
    assert mha(*words, "--json").json["sequences"][0]["tokens"] == hostile


def test_a_kind_alone_is_all_layers_of_this_kind(mha: Any) -> None:
    words = ("run", "the cat", "--brief", "--all", "--layer", "cross", "--model")
    shown = mha(*words, checkpoints.folder("t5")).stdout
    kinds = re.findall("^(cross|decoder|encoder) [0-9]+ ", shown, re.MULTILINE)
    assert kinds == ["cross"] * N_HALF * N_HEADS
    assert mha(*words, checkpoints.folder("gpt2"), code=2).said
