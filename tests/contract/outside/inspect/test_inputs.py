"""Inputs that people give: chats in parts, pairs of sentences, tables and compressed files,
paths.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import some
from support.small_models import (
    TEXT,
    bert_config,
    byte_tokenizer,
    eager,
    filled,
    llama_folder,
    saved,
    without_head,
    word_tokenizer,
)

import mhacli

ANY = (0, 1, 2)
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


@pytest.mark.real
def test_a_chat_whose_contents_are_lists_of_texts_has_the_tokens_of_the_texts(
    mha: Any, tmp_path: Path
) -> None:
    byte_tokenizer(llama_folder(tmp_path / "model"), template=TEMPLATE)
    plain = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "past the mill"}]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in plain]
    ids = []
    for name, chat in {"plain.json": plain, "parts.json": parts}.items():
        (tmp_path / name).write_text(json.dumps(chat))
        document = mha("run", "--chat", name, "--model", "model", "--view", "none", "--json").json
        ids.append(document["sequences"][0]["ids"])
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    "use",
    [lambda path: mhacli.load(path).heads, lambda path: mhacli.diff(path, path).verdict],
    ids=["load", "diff"],
)
def test_a_record_is_read_from_a_path(tmp_path: Path, use: Any) -> None:
    path = tmp_path / "r.safetensors"
    mhacli.inspect(TEXT, mhacli.Config(n_heads=2)).save(path)
    assert use(path)


@pytest.mark.real
def test_a_table_of_texts_is_not_scanned_as_one_text_in_silence(mha: Any, tmp_path: Path) -> None:
    llama_folder(tmp_path / "model")
    (tmp_path / "rows.csv").write_text(
        'id,text\n1,"the fox, the mill"\n2,"a small ""old"" river"\n3,the fox sleeps\n'
    )
    ended = mha("scan", "--model", "model", "rows.csv", "--out", "out", "--json", code=ANY)
    if ended.code == 0 and ended.json["corpus"]["n_documents"] != 3:
        assert re.search(r"csv|column|--field", ended.stderr, re.IGNORECASE)


@pytest.mark.real
def test_a_compressed_corpus_is_read_or_refused_as_compressed(mha: Any, tmp_path: Path) -> None:
    llama_folder(tmp_path / "model")
    lines = b'{"text": "the fox sleeps"}\n{"text": "a small river"}\n'
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    ended = mha("scan", "--model", "model", "c.jsonl.gz", "--out", "out", "--json", code=ANY)
    assert ended.code == 0 or re.search("gzip|compress|gunzip|zcat", ended.said, re.IGNORECASE)


@pytest.mark.real
def test_a_pair_of_sentences_has_the_weights_of_a_pair_or_a_warning(
    mha: Any, tmp_path: Path
) -> None:
    import transformers

    model = filled(transformers.BertModel(bert_config()), scale=0.2)
    pair = word_tokenizer(saved(model, tmp_path / "model"))(
        "the old mill", TEXT, return_tensors="pt"
    )
    with torch.no_grad():
        expected = eager(model)(**pair, output_attentions=True).attentions[0][0]
    command = ("run", f"the old mill [SEP] {TEXT}", "--model", "model", "--layer", "0")
    ended = mha(*command, "--json", "--keep", "pattern", "--save", "r.safetensors")
    is_pair = ended.json["sequences"][0]["ids"] == pair["input_ids"][0].tolist()
    is_said = re.search(
        "token.?type|segment|pair|second (text|sentence)", ended.stderr, re.IGNORECASE
    )
    if is_pair and not is_said:
        weights = mhacli.load(str(tmp_path / "r.safetensors")).pattern(layer=0).values
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "family", some(("Bert", "Albert", "Electra", "DistilBert"), default=["Bert"])
)
def test_both_sentences_are_read_as_the_tokenizer_encodes_a_pair(
    mha: Any, tmp_path: Path, family: str
) -> None:
    import transformers

    sizes = (
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4} if family == "DistilBert" else {}
    )
    config = getattr(transformers, f"{family}Config")(
        **{**bert_config().to_diff_dict(), "embedding_size": 32, **sizes}
    )
    model = filled(getattr(transformers, f"{family}Model")(config), scale=0.2)
    tokenizer = word_tokenizer(saved(model, tmp_path / "model"), has_types=family != "DistilBert")
    seconds = [TEXT, "a small river runs past"]
    pairs = tokenizer(["the old mill"] * 2, seconds, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = [
            layer.numpy() for layer in eager(model)(**pairs, output_attentions=True).attentions
        ]
    texts = [
        "the old mill",
        "the old mill",
        *(word for second in seconds for word in ("--pair", second)),
    ]
    ended = mha("run", *texts, "--model", "model", "--keep", "pattern", "--json")
    for own, layer in zip(ended.json["layers"], expected, strict=True):
        real = pairs["attention_mask"].numpy()[:, None, :, None]
        np.testing.assert_allclose(np.array(own["pattern"]) * real, layer * real, rtol=0, atol=5e-6)
    for i, sequence in enumerate(ended.json["sequences"]):
        n = int(pairs["attention_mask"][i].sum())
        assert sequence["ids"] == pairs["input_ids"][i, :n].tolist()
        types = pairs["token_type_ids"][i, :n].tolist() if family != "DistilBert" else []
        assert sequence["token_type_ids"] == types
        assert [sequence["text"][slice(*span)] for span in sequence["offsets"]] == [
            "" if token.startswith("[") else token for token in sequence["tokens"]
        ]
    assert not ended.stderr


def test_a_pair_is_seen_on_the_screen_and_its_heads_are_removed(mha: Any, tmp_path: Path) -> None:
    import transformers

    model = filled(transformers.BertModel(bert_config()), scale=0.2)
    pair = word_tokenizer(saved(model, tmp_path / "model"))(
        "the old mill", TEXT, return_tensors="pt"
    )
    words = ("the old mill", "--pair", TEXT, "--model", "model")
    rows = [
        line.split()
        for line in mha("run", *words, "--tokens", "--view", "none").stdout.splitlines()
    ]
    seen = [
        (row[2], row[-2])
        for row in rows
        if row[:1] and row[0].isdecimal() and len(row) > 4 and row[-1] == "special"
    ]
    assert seen == [("[CLS]", "0"), ("[SEP]", "0"), ("[SEP]", "1")]
    effects = mha("effect", *words, "--position", "0", "--json").json["effects"]
    with torch.no_grad():
        before = model(**pair).last_hidden_state[0, 0]
        for effect in effects:
            hook = without_head(
                model.encoder.layer[effect["layer"]].attention.output.dense, effect["head"]
            )
            change = model(**pair).last_hidden_state[0, 0] - before
            hook.remove()
            assert effect["d_output"] == pytest.approx(
                float(change.norm() / before.norm()), rel=1e-4
            )
    assert len(effects) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--pair needs --model"),
        (("--model", "none", "--context", "x"), "--pair and --context exclude each other"),
        (("--model", "none", "--generate", "2"), "--pair and --generate exclude each other"),
    ],
)
def test_a_pair_is_refused_where_nothing_reads_it(
    mha: Any, words: tuple[str, ...], said: str
) -> None:
    assert said in mha("heads", TEXT, "--pair", "the mill", *words, code=2).stderr
