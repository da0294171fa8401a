"""Writes the JSON Schemas of what mha prints, docs/schemas/*.json, from the dataclasses that it prints.

    python docs/schemas.py

It also writes the table of a record's fields in docs/RECORDS.md. What no dataclass declares is added here.
The tests validate what the commands print.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mhacli.commands.bench.comparison import BaselineComparison
from mhacli.commands.bench.result import Benchmark
from mhacli.commands.check.result import Examination
from mhacli.commands.diff.result import (
    EffectDifference,
    HeadChange,
    Setting,
    SiteDifference,
    TextDifference,
    TokenChange,
)
from mhacli.commands.doctor.result import CheckStatus, HealthCheck, HealthVerdict, Numerics, Report
from mhacli.commands.explain import Term
from mhacli.commands.weights import Contents
from mhacli.record.heads import MATRICES, PER_QUERY
from mhacli.record.mask import SequenceMask
from mhacli.record.record import InspectedLayer, Record
from mhacli.settings import Config
from mhacli.sites import SITES
from mhacli.text.tokens import TokenSequence

FOLDER = Path(__file__).parent / "schemas"
PAGE = Path(__file__).parent / "RECORDS.md"
BETWEEN = re.compile(r"(?<=<!-- record -->\n).*?(?=<!-- /record -->)", re.DOTALL)
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TEXTS: Schema = {"type": "array", "items": TEXT}
VECTORS = (
    *("received", "map", "profile", "visible", "uniform_map", "uniform_received", "uniform_profile", "strongest_key"),
    *("span_mass", "uniform_span_mass", "corner", "top_keys", "top_shares"),
)
LAYER_ARRAYS = tuple(dict.fromkeys(("qk", "scores", "pattern", "z", "out", *PER_QUERY, *MATRICES, *VECTORS)))


def of(annotation: Any, **added: Schema) -> Schema:
    """The schema of an annotation. `added` are properties that a document has beside the fields of a dataclass."""
    if dataclasses.is_dataclass(annotation):
        return _object(annotation, added)
    if get_origin(base := getattr(annotation, "__orig_bases__", (None,))[0]) is tuple:  # a tuple with methods
        return of(base)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        (inner,) = (of(choice) for choice in arguments if choice is not type(None))
        return nullable(inner)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": of(arguments[1])}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": of(arguments[0])}
    if origin is tuple:
        n = len(arguments)
        return {"type": "array", "prefixItems": [of(kind) for kind in arguments], "minItems": n, "maxItems": n}
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean"}[annotation]}


def _object(kind: Any, added: Mapping[str, Schema]) -> Schema:
    hints = get_type_hints(kind)
    fields = [f for f in dataclasses.fields(kind) if f.metadata.get("json", True)]
    properties = {f.name: of(hints[f.name]) for f in fields} | added
    left_out = {f.name for f in fields if f.metadata.get("omit_empty")}
    return record(properties, optional=left_out)


def record(properties: Mapping[str, Schema], *, optional: set[str] | None = None) -> Schema:
    """An object with these properties; those that are not `optional` are always there."""
    required = [name for name in properties if name not in (optional or ())]
    return {"type": "object", "properties": dict(properties), "required": required}


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def array(schema: Schema) -> Schema:
    """A list of what a schema describes."""
    return {"type": "array", "items": schema}


def changed(schema: Schema, *, drop: tuple[str, ...] = (), optional: tuple[str, ...] = (), **new: Schema) -> Schema:
    """The schema of an object without some properties, with others, some of which need not be there."""
    properties = {name: value for name, value in schema["properties"].items() if name not in drop} | new
    known = set(properties) - set(schema["required"]) - set(new)
    return record(properties, optional=known | set(optional))


ARRAY: Schema = {
    "description": "Nested lists, an axis per level. null: the array was not kept, or the number is masked or not finite.",
    "type": ["array", "null"],
    "items": {"$ref": "#/$defs/array_item"},
}
ARRAY_ITEM: Schema = {
    "anyOf": [{"type": ["number", "boolean", "null"]}, {"type": "array", "items": {"$ref": "#/$defs/array_item"}}]
}
SITE = record({"layer": TEXT, "site": nullable(TEXT)})
ITEMS = {
    "token": record({"token": TEXT, "id": INTEGER, "count": INTEGER, "bytes": INTEGER}),
    "position": record(
        {"first": INTEGER, "last": INTEGER, "place": INTEGER, "token": TEXT},
        optional={"first", "last", "place", "token"},
    ),
}


RECORD_FIELDS = {
    "command": "the command line",
    "config": "sizes, mask, positions, scale, dropout, dtype, seed, tokenizer",
    "sequences": "the texts with their tokens, ids and character offsets",
    "context": "the other text of cross-attention, or null",
    "vocabulary": "the tokens; the position is the id",
    "trace": "every tensor: site, axes, shape, dtype, formula, meaning, layout, strides, FLOPs, bytes, time",
    "qk": "dot products, `[batch][head][query][key]`; null where masked",
    "scores": "attention scores before the softmax, `[batch][head][query][key]`; null where masked",
    "pattern": "attention weights, `[batch][head][query][key]`; 0 where masked",
    "z": "head outputs, `[batch][head][query][d_v]`",
    "out": "layer output, `[batch][query][d_model]`",
    "entropy": "entropy of each query in nats, `[batch][head][query]`",
    "strongest_key": "the key with the largest weight of each query, `[batch][head][query]`",
    "heads": "one object per head: type, statistics, sinks, outstanding cells, and the same for uniform attention",
    "timings": "per site and in total: samples, median, interquartile range, in seconds",
    "self_check": "largest difference, tolerance, ok",
    "environment": "versions, device, threads",
    "weights": "the file of the weights, or null for random ones",
    "not_kept": "arrays that were left out to stay within `--keep-limit`",
    "routes": "`trace`: the formulations, and how far their outputs differ",
    "cell": "`trace --cell`: the numbers on the way to one weight",
    "decoding": "`decode`: the cache strategies with their times and bytes",
    "survey": "`heads`: how statistics were computed, by which `reducer` and why by torch (`torch_because`), and their checks",
    "model": "`--model`: the checkpoint, and what was inspected",
    "layers": "`--model`: one object per attention, with its own arrays and self-check",
    "spans": "`--span`: the tokens of each named part",
    "module": "`trace FILE.py:CLASS`: the class, its arguments and sizes",
    "effects": "`effect`: a list of removals, each with what it changes",
    "effect": "`effect`: what was measured and where, the noise floor, and the removals that were computed a second time",
    "corpus": "`scan`: the documents, and how the statistics of each head spread over them",
    "nonfinite": "how many numbers of each array are NaN or infinite; those are null",
}


def record_table() -> str:
    """The fields of a record as a table of docs/RECORDS.md."""
    rows = [f"| `{name}` | {content} |" for name, content in RECORD_FIELDS.items()]
    return "\n".join(["| field | content |", "|---|---|", *rows]) + "\n"


def _record() -> Schema:
    arrays = dict.fromkeys(LAYER_ARRAYS, ARRAY)
    always = ("qk", "scores", "pattern", "z", "out")
    layer = of(InspectedLayer)
    layer = changed(layer, optional=tuple(name for name in arrays if name not in always), **arrays)
    traced = {"type": "object", "additionalProperties": INTEGER}
    whole = changed(of(Record), drop=("layers",), nonfinite=traced)
    kept = {"context_array" if name == "context" else name: ARRAY for name in SITES}  # by --keep
    at_top = {**arrays, **kept, "layers": array(layer)}
    schema = changed(whole, optional=tuple(at_top), **at_top)
    described = {name: {**schema["properties"][name], "description": text} for name, text in RECORD_FIELDS.items()}
    return {**schema, "properties": schema["properties"] | described, "$defs": {"array_item": ARRAY_ITEM}}


def _doctor() -> Schema:
    check = of(HealthCheck, status=of(CheckStatus))
    numerics = of(Numerics, ok={"type": "boolean"})
    environment: Schema = {"type": "object", "additionalProperties": TEXT}
    head = {"verdict": of(HealthVerdict), "summary": TEXT}
    return changed(of(Report), **head, checks=array(check), numerics=array(numerics), environment=environment)


def _bench() -> Schema:
    return changed(
        of(Benchmark),
        drop=("schema",),
        optional=("comparison",),
        summary=TEXTS,
        ceilings={"type": "array"},
        controls={"type": "array"},
        comparison=of(BaselineComparison, summary=TEXT),
    )


def _diff() -> Schema:
    counts = {"n_aligned": INTEGER, "is_same": {"type": "boolean"}, "n_replaced": INTEGER}
    text = of(TextDifference, **counts, changes=array(of(TokenChange, a=TEXTS, b=TEXTS)))
    layer = {
        "layer": TEXT,
        "sites": array(of(SiteDifference, relative=nullable(NUMBER))),
        "heads": array(of(HeadChange)),
        "only_a": TEXTS,
        "only_b": TEXTS,
    }
    return record(
        {
            "command": TEXTS,
            "verdict": {"enum": ["agree", "differ", "nothing"]},
            "summary": TEXT,
            "said": TEXT,
            "a": TEXT,
            "b": TEXT,
            "tolerance": record({"relative": NUMBER, "of_dtype": nullable(TEXT)}),
            "first": nullable(changed(SITE, where={"enum": ["tokens", "ids", "site", "effects"]})),
            "first_site": nullable(SITE),
            "settings": array(of(Setting)),
            "n_sequences": {"type": "array", "prefixItems": [INTEGER, INTEGER], "minItems": 2, "maxItems": 2},
            "texts": array(text),
            "layers": array(record(layer)),
            "only_a": TEXTS,
            "only_b": TEXTS,
            "effects": nullable(of(EffectDifference)),
        }
    )


def _mask() -> Schema:
    texts = array(of(TokenSequence))
    return record(
        {
            "command": TEXTS,
            "config": of(Config),
            "sequences": texts,
            "context": nullable(texts),
            "rules": TEXTS,
            "masks": array(of(SequenceMask, n_visible=INTEGER, density=NUMBER)),
        }
    )


def _weights_info() -> Schema:
    tensor = record({"name": TEXT, "dtype": TEXT, "shape": array(INTEGER), "n_bytes": INTEGER})
    files = array(record({"name": TEXT, "n_bytes": INTEGER}))
    return changed(of(Contents), optional=("tensors",), files=files, tensors=array(tensor))


def _row() -> Schema:
    position, weight = ITEMS["position"], nullable(NUMBER)
    return record(
        {
            "layer": nullable(INTEGER),
            "attention": nullable(TEXT),
            "head": INTEGER,
            "kind": nullable(TEXT),
            "sequence": INTEGER,
            "query": position,
            "entropy": weight,
            "sinks": record({"places": array(INTEGER), "share": weight, "removed": {"type": "boolean"}}),
            "learned_sink": weight,
            "shares": TEXT,
            "keys": array(changed(position, share=weight)),
        }
    )


SCHEMAS: Mapping[str, tuple[str, Schema]] = {
    "mha.record/1": ("What run, heads, trace, decode and show print with --json.", _record()),
    "mha.mask/1": ("What mha trace --mask --json prints.", _mask()),
    "mha.check/1": ("What mha check --json prints.", of(Examination, summary=TEXT)),
    "mha.doctor/1": ("What mha doctor --json prints.", _doctor()),
    "mha.diff/1": ("What mha diff --json prints.", _diff()),
    "mha.bench/1": ("What mha bench prints with --json, and saves with --save-baseline.", _bench()),
    "mha.vocab/1": (
        "What mha vocab prints with --json and saves with --save.",
        record({"tokenizer": TEXT, "inner_marks": of(bool), "tokens": array(ITEMS["token"])}),
    ),
    "mha.explain/1": ("What mha explain --json prints.", record({"terms": array(of(Term))})),
    "mha.weights-info/1": ("What mha weights info --json prints.", _weights_info()),
    "mha.row/1": ("What the key y of mha view copies.", _row()),
}


def document(name: str) -> Schema:
    """The JSON Schema of a schema's name."""
    description, schema = SCHEMAS[name]
    properties = {"schema": {"const": name}, **schema["properties"]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, "description": description}
    return {**head, **schema, "properties": properties, "required": ["schema", *schema["required"]]}


def path_of(name: str) -> Path:
    """The file of a schema."""
    return FOLDER / f"{name.replace('/', '-')}.json"


def text_of(name: str) -> str:
    """What that file contains."""
    return json.dumps(document(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in SCHEMAS:
        path_of(name).write_text(text_of(name))
    PAGE.write_text(BETWEEN.sub(lambda _: record_table(), PAGE.read_text()))
