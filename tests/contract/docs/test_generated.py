"""What scripts write below docs/ is current: the JSON Schemas, the tables of READING.md and
RECORDS.md, and the notebook.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import nbformat
import pytest
from support import checkpoints, documents, rounding
from support.documents import ROOT, furnish
from support.golden import Page

SENTENCE = '"the cat sat on the mat" --heads 2'
ATTENTION = "sample_texts/my_attention.py:MultiHeadAttention --arg d_model=64 --arg n_heads=8"
FIRST = f"mha run {SENTENCE} --causal --save a.safetensors --save-weights w.safetensors --json"
PRINTED = {
    "mha.record/1": [
        FIRST,
        (
            f"mha run {SENTENCE} --context 'le chat' --train --dropout 0.1 --kv-heads 1 --keep"
            " context,q,k,out,dropped --json"
        ),
        "mha run --random 2,5 --json",
        f"mha heads {SENTENCE} --rows 0:2 --query 1 --keep-z --where 'q == k' --json",
        f"mha trace {SENTENCE} --causal --cell 0,2,1 --values --json",
        f"mha decode {SENTENCE} --prompt-len 4 --json",
        "mha run 'the cat sat' --model gpt2 --layer 1,2 --span 'a=0:3' --span 'b=4:7' --json",
        "mha effect 'the cat sat' --model gpt2 --layer 1 --json",
    ],
    "mha.record/1 of code": [f"mha trace {ATTENTION} --json"],
    "mha.mask/1": [
        f"mha trace {SENTENCE} --mask --causal --window 2 --json",
        f"mha trace {SENTENCE} --context 'le chat' --mask --json",
    ],
    "mha.diff/1": [
        "mha run 'the dog sat on a mat' --heads 2 --scale 0.5 --save c.safetensors --view none",
        "mha diff a.safetensors c.safetensors --json",
        "mha diff a.safetensors a.safetensors --json",
        "mha diff gpt2 gpt2 'the cat sat' --json",
        "mha diff gpt2 sample_texts/my_port.py:ours --ids 3,5 --json",
    ],
    "mha.explain/1": ["mha explain --json", "mha explain sink --json"],
    "mha.vocab/1": ["mha vocab 'the cat sat' --json"],
    "mha.weights-info/1": [
        "mha weights info w.safetensors --tensors --json",
        "mha weights info gpt2 --json",
    ],
    "mha.check/1": [
        f"mha check {ATTENTION} --json",
        f"mha check {ATTENTION} --against torch.nn:MultiheadAttention --json",
    ],
    "mha.checks/1": [
        'printf \'[tool.mha.check]\ntargets = ["nowhere.py:A", "sample_texts/my_gpt.py:GPT"]\''
        " > pyproject.toml",
        "mha check --json",
    ],
    "mha.doctor/1": ["mha doctor --dtype float32 --json", "mha doctor --model gpt2 --json"],
    "mha.bench/1": [
        "mha bench --backends explicit,cudnn,sdpa --lengths 64 --budget 0.1 --json",
    ],
}


@pytest.fixture(scope="module")
def schemas() -> ModuleType:
    """The script that writes the schemas."""
    return documents.script("schemas")


def closed(schema: Any) -> Any:
    """The schema, which allows no properties that it does not describe."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    return (
        {"additionalProperties": False, **inner}
        if isinstance(inner.get("required"), list)
        else inner
    )


OF_EARLIER = ROOT / "tests" / "contract" / "old" / "schemas-0.2"
"""The schemas of version 0.2.0, for which programs were written."""


def schema_of(name: str, folder: Path = ROOT / "docs" / "schemas") -> Any:
    """The published schema of a document."""
    return json.loads((folder / f"{name.replace('/', '-')}.json").read_text())


@pytest.mark.real
@pytest.mark.parametrize("name", PRINTED)
def test_what_commands_print_is_what_the_schema_describes(name: str, tmp_path: Path) -> None:
    (furnish(tmp_path) / "gpt2").symlink_to(checkpoints.folder("gpt2"))
    name = name.partition(" ")[0]
    schemas = [schema_of(name), closed(schema_of(name))]
    if (OF_EARLIER / f"{name.replace('/', '-')}.json").exists():
        schemas.append(schema_of(name, OF_EARLIER))
    validators = [jsonschema.Draft202012Validator(schema) for schema in schemas]
    documents.run(FIRST, tmp_path)
    for command in PRINTED[name]:
        ended = documents.run(f"{command} --force" if command == FIRST else command, tmp_path)
        assert ended.returncode in (0, 3), ended.stderr
        if "--json" in command:
            printed = json.loads(ended.stdout)
            assert printed["schema"] == name
            wrong = [
                f"{one.json_path}: {one.message:.200}"
                for each in validators
                for one in each.iter_errors(printed)
            ]
            assert wrong == [], command


def test_a_field_that_is_missing_or_undescribed_is_noticed() -> None:
    validator = jsonschema.Draft202012Validator(closed(schema_of("mha.vocab/1")))
    printed = {"schema": "mha.vocab/1", "tokenizer": "word", "inner_marks": True, "tokens": []}
    assert validator.is_valid(printed)
    assert not validator.is_valid({**printed, "more": 1})
    assert not validator.is_valid({"schema": "mha.vocab/1", "inner_marks": True, "tokens": []})


def test_the_files_of_the_schemas_are_what_the_script_writes(schemas: ModuleType) -> None:
    assert [
        name
        for name in schemas.SCHEMAS
        if schemas.path_of(name).read_text() != schemas.text_of(name)
    ] == []
    for name in {*schemas.SCHEMAS, *(name.partition(" ")[0] for name in PRINTED), "mha.row/1"}:
        jsonschema.Draft202012Validator.check_schema(schema_of(name))


def test_the_tables_of_reading_are_what_the_script_writes() -> None:
    reading = documents.script("reading")
    page = reading.PAGE.read_text()
    for name in reading.PARTS:
        assert page.count(f"<!-- {name} -->") == page.count(f"<!-- /{name} -->") == 1
    assert reading.written(page) == page, "run docs/reading.py"
    assert reading.written(page.replace("| `H` | entropy |", "| `X` | other |")) == page


# ----------------------------------------------------------------------------------------- notebook


def cells_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> dict[str, str]:
    """What a cell shows as HTML and as text, in one line: where lines break depends on times,
    errors and the machine.
    """
    texts = {}
    for kind, text in cell.outputs[0].data.items():
        words = " ".join((Page(text).text if kind == "text/html" else text).split())
        words = re.sub(
            r"device name .*? · |largest difference \S+|mha \d+\.\d+\S*|· threads \d+|layer \d+"
            r" ·|(?<=\)), layer \d+| · ",
            " ",
            documents.without_varying(words),
        )
        texts[kind] = " ".join(words.split())
    return texts


def test_the_notebook_has_the_cells_of_its_script_with_their_outputs() -> None:
    kept = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    assert [cell.source for cell in cells_of(kept)] == [
        code for _, code in documents.script("notebook").CELLS
    ]
    for cell in cells_of(kept):
        (output,) = cell.outputs
        html = output.data.get("text/html", "")
        assert len(html.encode()) < 200_000
        assert not re.search("<script|<iframe|http", html)


@pytest.mark.real
def test_the_cells_of_the_notebook_run_and_show_what_they_showed() -> None:
    kept = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    made = documents.script("notebook").notebook(str(checkpoints.minilm()))
    for new, old in zip(map(shown, cells_of(made)), map(shown, cells_of(kept)), strict=True):
        assert new.keys() == old.keys()
        for kind, text in old.items():
            assert rounding.with_near_numbers_of_old(new[kind], text) == text
