"""The table of heads of `mha heads --effect --control` and of `mhacli.heads`: a row a head, with
the numbers of both commands.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints
from support.induction import COPYING, INDUCTION, N_HEADS, N_LAYERS, induction_checkpoint
from support.small_models import bert_config, filled, saved, word_tokenizer

import mhacli

TEXTS = ("the cat sat on the mat", "a dog ran")
REPEATED = "a b c d a b c d a b c d"


@pytest.fixture(scope="module", params=["gpt2", pytest.param("t5", marks=pytest.mark.real)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def by_head(
    rows: list[dict[str, Any]], kind: str = "attention"
) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(row["layer"], row[kind], row["head"]): row for row in rows}


def test_a_row_has_the_statistics_of_heads_and_the_mean_effect_over_the_texts(
    family: str, mha: Any
) -> None:
    model = ("--model", checkpoints.folder(family))
    table = mha("heads", *TEXTS, *model, "--effect", "--json").json
    plain = mha("heads", *TEXTS, *model, "--json").json
    kinds = {layer["name"]: layer["kind"] for layer in table["layers"]}
    effects = [mha("effect", text, *model, "--json").json for text in TEXTS]
    of_texts = [by_head(each["effects"], "kind") for each in effects]
    added = ("d_logit", "d_output", "floor")
    assert len(table["heads"]) == len(plain["heads"]) == len(of_texts[0])
    for head, expected in zip(table["heads"], plain["heads"], strict=True):
        assert {name: value for name, value in head.items() if name not in added} == {
            name: value for name, value in expected.items() if name not in added
        }
        rows = [
            of_text[head["layer"], kinds[head["attention"]], head["head"]] for of_text in of_texts
        ]
        for name in ("d_logit", "d_output"):
            assert head[name] == pytest.approx(
                fmean(row[name] for row in rows), rel=1e-4, abs=1e-6
            ), name
        assert head["floor"] == pytest.approx(
            max(each["effect"]["floor"] for each in effects), rel=0.5
        )


@pytest.mark.real
def test_the_weight_on_the_previous_token_is_that_of_the_model_itself(mha: Any) -> None:
    table = mha("heads", *TEXTS, "--model", checkpoints.folder("gpt2"), "--effect", "--json").json
    model = checkpoints.model("gpt2", attn_implementation="eager")
    weights = []
    for text in table["sequences"]:
        with torch.no_grad():
            layers = model(torch.tensor([text["ids"]]), output_attentions=True).attentions
        pattern = np.stack(
            [layer[0].double().numpy() for layer in layers]
        )  # layer, head, query, key
        n = pattern.shape[-1]
        on_previous = np.zeros((*pattern.shape[:2], n))
        on_previous[..., 1:] = pattern[..., np.arange(1, n), np.arange(n - 1)]
        weights.append(on_previous)
    expected = np.concatenate(weights, axis=-1).mean(axis=-1)
    assert [head["previous"] for head in table["heads"]] == pytest.approx(
        expected.reshape(-1).tolist(), abs=2e-6
    )


@pytest.fixture(scope="module")
def circuit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return induction_checkpoint(tmp_path_factory.mktemp("circuit"), 20.0)


def test_a_head_of_positions_has_its_type_on_random_tokens_and_one_of_contents_has_not(
    circuit: Path, mha: Any
) -> None:
    words = ("heads", REPEATED, "--model", circuit, "--control", "--effect")
    heads = {(head["layer"], head["head"]): head for head in mha(*words, "--json").json["heads"]}
    copying, induction = heads[COPYING], heads[INDUCTION]
    assert copying["kind"] == copying["control"]["kind"] == "previous-token"
    assert copying["control"]["previous"] == pytest.approx(copying["previous"], abs=1e-6)
    assert induction["kind"] == "induction"
    assert induction["control"]["induction"] < induction["induction"] - 0.1
    assert {place for place, head in heads.items() if head["d_logit"]} == {COPYING, INDUCTION}
    shown = mha(*words, "--brief", env={"COLUMNS": "160"}).stdout
    (line,) = [line for line in shown.splitlines() if "induction" in line and "=" not in line]
    assert line.count("induction") == 1 + (induction["control"]["kind"] == "induction")
    assert shown.count("previous token") >= 2


def test_the_control_reads_the_same_special_tokens_and_types(mha: Any, tmp_path: Path) -> None:
    import transformers

    model = transformers.BertModel(bert_config())
    word_tokenizer(saved(filled(model, scale=0.2), tmp_path / "model"))
    texts = ("the old mill", "--pair", "the fox sleeps")
    words = ("heads", *texts, "--model", "model", "--control", "--json")
    heads = mha(*words).json["heads"]
    assert heads == mha(*words).json["heads"]  # the random tokens are the same in every run
    for head in heads:
        assert head["control"]["uniform"]["sink"] == head["uniform"]["sink"] == pytest.approx(1 / 9)
        assert head["control"]["entropy"] != head["entropy"]
        assert head["d_output"] is None


def test_a_table_with_a_control_lists_as_many_heads_as_one_without(mha: Any) -> None:
    words = ("heads", TEXTS[0], "--model", checkpoints.folder("gpt2"))
    n_rows = [
        len(re.findall(r"^ +[0-9]+ +[0-9]+ ", mha(*words, *more).stdout, re.MULTILINE))
        for more in ((), ("--control",), ("--control", "--all"))
    ]
    assert n_rows[0] == n_rows[1] < n_rows[2]


def test_csv_the_saved_record_and_python_have_the_same_table(
    circuit: Path, mha: Any, tmp_path: Path
) -> None:
    options = ("--effect", "--control", "--save", "r.safetensors")
    words = ("heads", REPEATED, "--model", circuit, *options)
    rows = [*csv.DictReader(io.StringIO(mha(*words, "--csv").stdout))]
    table = mhacli.load(str(tmp_path / "r.safetensors")).heads
    assert mha("show", "r.safetensors", "--csv").stdout == mha(*words, "--force", "--csv").stdout
    columns = table.to_dicts()
    assert len(rows) == len(columns) == N_LAYERS * N_HEADS
    for row, of_table in zip(rows, columns, strict=True):
        names = "d_logit d_output floor control_previous control_max_score control_certainty"
        for name in names.split():
            assert float(row[name]) == of_table[name], name
        assert row["control_kind"] == of_table["control_kind"]
    for change in ("d_output", "d_logit"):
        ranked = mha("show", "r.safetensors", "--sort", change, "--brief").stdout.splitlines()
        largest = sorted(columns, key=lambda row: -abs(row[change]))[:2]
        shown = [line.split()[:2] for line in ranked[1:3]]
        assert shown == [[str(row["layer"]), str(row["head"])] for row in largest]


def test_python_measures_a_folder_and_a_model_in_memory(mha: Any) -> None:
    import transformers

    folder = checkpoints.folder("gpt2")
    expected = mha("heads", *TEXTS, "--model", folder, "--effect", "--control", "--json").json[
        "heads"
    ]
    model = checkpoints.model("gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for record in (
        mhacli.heads(str(folder), TEXTS, effect=True, control=True),
        mhacli.heads(model, TEXTS, tokenizer, effect=True, control=True),
    ):
        assert json.loads(json.dumps(record.document()["heads"])) == expected
    assert mhacli.heads(folder, TEXTS[0]).heads[0].d_output is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--effect",), "--effect needs --model"),
        (("--control",), "--control needs --model"),
        (
            ("--model", "none", "--effect", "--generate", "2"),
            "--effect and --generate exclude each other",
        ),
    ],
)
def test_the_table_is_refused_where_it_cannot_be(
    mha: Any, words: tuple[str, ...], said: str
) -> None:
    assert said in mha("heads", TEXTS[0], *words, code=2).stderr


def test_python_refuses_what_it_cannot_measure() -> None:
    model = checkpoints.model("gpt2")
    with pytest.raises(mhacli.MhaError, match="tokenizer"):
        mhacli.heads(model, TEXTS)
    with pytest.raises(mhacli.MhaError, match="no text"):
        mhacli.heads("none", [])
