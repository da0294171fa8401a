"""Writes the JSON Schemas of what mha prints, docs/schemas/*.json, from the types that it prints.

    python docs/schemas.py

It also writes the table of a record's fields in docs/RECORDS.md. What no type declares is added here.
The tests validate what the commands print.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from mhacli.commands.bench.comparison import BaselineComparison, FailIfOutcome, TimeChange
from mhacli.commands.bench.result import Benchmark
from mhacli.commands.check.result import Examination
from mhacli.commands.diff.result import Difference, EffectDifference, HeadChange, TextDifference
from mhacli.commands.doctor.result import CheckStatus, HealthVerdict, Report
from mhacli.commands.explain import Term
from mhacli.commands.weights import Contents
from mhacli.record.effect import Effect
from mhacli.record.heads import MATRICES, PER_QUERY
from mhacli.record.mask import MaskSummary
from mhacli.record.record import Record
from mhacli.sites import SITES

FOLDER = Path(__file__).parent / "schemas"
PAGE = Path(__file__).parent / "RECORDS.md"
BETWEEN = re.compile(r"(?<=<!-- record -->\n).*?(?=<!-- /record -->)", re.DOTALL)
Numbers = Annotated[
    list[Any] | None,
    msgspec.Meta(
        description="Nested lists, an axis per level. null: the array was not kept, or the number is masked or not finite."
    ),
]
VECTORS = (
    *("received", "map", "profile", "visible", "uniform_map", "uniform_received", "uniform_profile", "strongest_key"),
    *("span_mass", "uniform_span_mass", "corner", "top_keys", "top_shares"),
)
ARRAYS = {f"{name}?": Numbers for name in dict.fromkeys((*PER_QUERY, *MATRICES, *VECTORS))}
"""The arrays of a layer. A name that ends in ? may be missing."""
KEPT = {f"{'context_array' if name == 'context' else name}?": Numbers for name in SITES}
"""Arrays that `--keep` adds."""
CHECK = dict.fromkeys(("name?", "note?", "rounding?", "sites?", "n?", "identical?"), ...)
"""The parts of a check that most checks lack."""
PLACE = dict.fromkeys(("first?", "last?", "place?", "token?"), ...)


class Site(TypedDict):
    """The place of a difference."""

    layer: str
    site: str | None


class First(Site):
    """The first difference."""

    where: Literal["tokens", "ids", "site", "effects"]


class Tolerance(TypedDict):
    """The tolerance of a comparison."""

    relative: float
    of_dtype: str | None


class LayerPair(TypedDict):
    """The differences of a layer."""

    layer: str
    sites: list[Difference]
    heads: list[HeadChange]
    only_a: list[str]
    only_b: list[str]


class TokenChange(TypedDict):
    """Consecutive tokens without a match in the other text."""

    change: Literal["replaced", "only A", "only B"]
    a_begin: int
    a_end: int
    b_begin: int
    b_end: int
    a: list[str]
    b: list[str]


class Match(TypedDict):
    """Equal tokens, from the positions `a` and `b`."""

    a: int
    b: int
    length: int


class Setting(TypedDict):
    """A setting that differs."""

    name: str
    a: str
    b: str
    layers: list[str]


class Place(TypedDict):
    """The place of a number."""

    axes: list[str]
    a: list[int]
    b: list[int]


class HeadLargest(TypedDict):
    """The largest difference of one head at a site."""

    head: int
    largest: float | None
    sequence: int


class StatisticChange(TypedDict):
    """A statistic of a head that differs."""

    name: str
    a: float | None
    b: float | None


class EffectChange(TypedDict):
    """A removal with different effects."""

    a: Effect
    b: Effect
    change: float


class Comparison(TypedDict):
    """What `diff` prints."""

    command: list[str]
    verdict: Literal["agree", "differ", "nothing"]
    summary: str
    said: str
    a: str
    b: str
    tolerance: Tolerance
    first: First | None
    first_site: Site | None
    settings: list[Setting]
    n_sequences: tuple[int, int]
    texts: list[TextDifference]
    layers: list[LayerPair]
    only_a: list[str]
    only_b: list[str]
    effects: EffectDifference | None


class Rule(TypedDict):
    """The result of --fail-if."""

    limit: float
    outcome: FailIfOutcome
    undecided: list[TimeChange]


class VocabularyToken(TypedDict):
    """A token of a vocabulary."""

    token: str
    id: int
    count: int
    bytes: int


class Vocabulary(TypedDict):
    """What `vocab` prints."""

    tokenizer: str
    inner_marks: bool
    tokens: list[VocabularyToken]


class Terms(TypedDict):
    """What `explain` prints."""

    terms: list[Term]


class File(TypedDict):
    """A file of a checkpoint."""

    name: str
    n_bytes: int


class Tensor(File):
    """A tensor of a checkpoint."""

    dtype: str
    shape: list[int]


class Position(TypedDict):
    """A token, or several drawn as one."""

    first: int
    last: int
    place: int
    token: str


class Key(Position):
    """A key of the row."""

    share: float | None


class Sinks(TypedDict):
    """The sink keys of the row."""

    places: list[int]
    share: float | None
    removed: bool


class Row(TypedDict):
    """What the viewer copies."""

    layer: int | None
    attention: str | None
    head: int
    kind: str | None
    sequence: int
    query: Position
    entropy: float | None
    sinks: Sinks
    learned_sink: float | None
    shares: str
    keys: list[Key]


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


SCHEMAS: Mapping[str, tuple[str, Any, Mapping[str, Mapping[str, Any]]]] = {
    "mha.record/1": (
        "What run, heads, trace, decode and show print with --json.", Record,
        {
            "Record": {"arrays": None, "layers?": ..., "nonfinite": dict[str, int], **ARRAYS, **KEPT},
            "Check": CHECK, "SelfCheck": CHECK, "RouteCheck": {name: kind for name, kind in CHECK.items() if name != "name?"},
            "InspectedLayer": dict.fromkeys(("qk", "scores", "pattern", "z", "out"), Numbers) | ARRAYS,
        },
    ),
    "mha.mask/1": (
        "What mha trace --mask --json prints.", MaskSummary,
        {"MaskSummary": {"command": list[str]}, "SequenceMask": {"n_visible": int, "density": float}},
    ),
    "mha.check/1": ("What mha check --json prints.", Examination, {"Examination": {"summary": str}}),
    "mha.doctor/1": (
        "What mha doctor --json prints.", Report,
        {
            "Report": {"verdict": HealthVerdict, "summary": str, "environment": dict[str, str]},
            "HealthCheck": {"status": CheckStatus}, "Numerics": {"ok": bool},
        },
    ),
    "mha.diff/1": (
        "What mha diff --json prints.", Comparison,
        {
            "TextDifference": {"matches": list[Match], "changes": list[TokenChange]},
            "Difference": {"at": Place | None, "heads": list[HeadLargest], "told": list[Setting]},
            "HeadChange": {"statistics": list[StatisticChange]},
            "EffectDifference": {"changes": list[EffectChange]},
        },
    ),
    "mha.bench/1": (
        "What mha bench prints with --json, and saves with --save-baseline.", Benchmark,
        {
            "Benchmark": {
                "schema": None, "summary": list[str], "ceilings": list[Any], "controls": list[Any],
                "environment": dict[str, str | int | float | None], "comparison?": BaselineComparison,
            },
            "BaselineComparison": {"limit": None, "rule": Rule | None, "summary": str},
        },
    ),
    "mha.vocab/1": ("What mha vocab prints with --json and saves with --save.", Vocabulary, {}),
    "mha.explain/1": ("What mha explain --json prints.", Terms, {}),
    "mha.weights-info/1": (
        "What mha weights info --json prints.", Contents, {"Contents": {"files": list[File], "tensors?": list[Tensor]}},
    ),
    "mha.row/1": ("What the key y of mha view copies.", Row, {"Position": PLACE, "Key": PLACE}),
}  # fmt: skip
"""By schema: what prints it, its type, and how the printed objects differ from their types: None takes a field out, ... only
makes it optional."""


def document(name: str) -> dict[str, Any]:
    """The JSON Schema of a schema's name."""
    description, kind, changes = SCHEMAS[name]
    added = [
        (owner, field, annotation)
        for owner, fields in changes.items()
        for field, annotation in fields.items()
        if annotation not in (None, ...)
    ]
    kinds = [kind, *(annotation for _, _, annotation in added)]
    (top, *schemas), parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for (owner, field, _), schema in zip(added, schemas, strict=True):
        parts[owner]["properties"][field.rstrip("?")] = schema
    for owner, part in parts.items():
        change = changes.get(owner, {})
        properties = {
            field: schema for field, schema in part["properties"].items() if change.get(field, ...) is not None
        }
        for schema in properties.values():  # what is printed has all fields, those with a default too
            schema.pop("default", None)
        required = [field for field in properties if f"{field}?" not in change]
        parts[owner] = {"type": "object", "properties": properties, "required": required}
    whole = parts.pop(top["$ref"].rpartition("/")[2])
    described = {field: {"description": text} for field, text in RECORD_FIELDS.items() if kind is Record}
    properties = {field: {**described.get(field, {}), **schema} for field, schema in whole["properties"].items()}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, "description": description}
    properties = {"schema": {"const": name}, **properties}
    return {
        **head,
        "type": "object",
        "properties": properties,
        "required": ["schema", *whole["required"]],
        "$defs": parts,
    }


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
