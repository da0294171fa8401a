"""Writes the JSON Schemas of what mha prints, docs/schemas/*.json, from the types that it prints.

    python docs/schemas.py

What no type declares of a document is added here, and docs/RECORDS.md describes the fields of a
record. The schemas of `diff`, `explain`, `vocab`, `weights info` and of a copied row are written by
hand. The tests validate what the commands print against all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from mhacli.commands.bench.result import TIMING, Benchmark
from mhacli.commands.check.result import Examination
from mhacli.commands.doctor.result import CheckStatus
from mhacli.commands.doctor.run import Report
from mhacli.record.heads import PER_QUERY
from mhacli.record.record import Record
from mhacli.record.sites import SITES
from mhacli.settings import Config
from mhacli.text.tokens import TokenSequence

FOLDER = Path(__file__).parent / "schemas"
PAGE = Path(__file__).parent / "RECORDS.md"
Numbers = Annotated[
    list[Any] | None,
    msgspec.Meta(
        description=(
            "Nested lists, an axis per level. null: the array was not kept, or the number is masked"
            " or not finite."
        )
    ),
]
VECTORS = (
    *(
        "received",
        "map",
        "profile",
        "visible",
        "uniform_map",
        "uniform_received",
        "uniform_profile",
        "strongest_key",
    ),
    *("span_mass", "uniform_span_mass", "corner", "top_keys", "top_shares"),
)
ARRAYS = {
    f"{name}?": Numbers
    for name in dict.fromkeys((*PER_QUERY, "qk", "scores", "pattern", "allowed", *VECTORS))
}
"""The arrays of a layer. A name that ends in ? may be missing."""
KEPT = {f"{'context_array' if name == 'context' else name}?": Numbers for name in SITES}
"""Arrays that `--keep` adds."""
CHECK = dict.fromkeys(("name?", "note?", "rounding?", "sites?", "n?", "identical?"), ...)
"""The parts of a check that most checks lack."""


class SequenceMask(TypedDict):
    """The mask of a sequence."""

    visible_per_query: list[int]
    n_cells: int
    block: int
    block_counts: list[list[int]]
    n_visible: int
    density: float


class Mask(TypedDict):
    """What trace --mask prints."""

    config: Config
    sequences: list[TokenSequence]
    context: list[TokenSequence] | None
    rules: list[str]
    masks: list[SequenceMask]
    command: list[str]


class Checks(TypedDict):
    """What check prints of the targets that a pyproject.toml states: its path, how many have which
    verdict, and the reports in the order of the targets.
    """

    summary: str
    table: str
    reports: list[Examination]


class Library(TypedDict):
    """A library: the installed version (null: missing), the required range, and the extra that
    installs it (null: always needed).
    """

    name: str
    version: str | None
    needs: str
    extra: str | None


class Device(TypedDict):
    """A device for torch: what it is, and its memory."""

    name: str
    what: str
    total_bytes: int | None
    free_bytes: int | None


def described_fields() -> dict[str, str]:
    """What docs/RECORDS.md says of the fields of a record, by their names."""
    table = PAGE.read_text().partition("<!-- record -->")[2].partition("<!-- /record -->")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))


SCHEMAS: Mapping[str, tuple[str, Any, Mapping[str, Mapping[str, Any]]]] = {
    "mha.record/1": (
        "What run, heads, trace, decode and show print with --json.",
        Record,
        {
            "Record": {
                "arrays": None,
                "layers?": ...,
                "nonfinite": dict[str, int],
                **ARRAYS,
                **KEPT,
            },
            "Check": CHECK,
            "SelfCheck": CHECK,
            "RouteCheck": {name: kind for name, kind in CHECK.items() if name != "name?"},
            "InspectedLayer": (
                dict.fromkeys(("qk", "scores", "pattern", "z", "out"), Numbers) | ARRAYS
            ),
        },
    ),
    "mha.mask/1": ("What mha trace --mask --json prints.", Mask, {}),
    "mha.check/1": (
        "What mha check --json prints.",
        Examination,
        {"Examination": {"summary": str}},
    ),
    "mha.checks/1": (
        "What mha check --json prints without a target: the reports on those of a table.",
        Checks,
        {"Examination": {"schema": Literal["mha.check/1"], "summary": str}},
    ),
    "mha.doctor/1": (
        "What mha doctor --json prints.",
        Report,
        {
            "Report": {
                "verdict": Literal["healthy", "unhealthy"],
                "summary": str,
                "environment": dict[str, str],
                "libraries": list[Library],
                "devices": list[Device],
            },
            "HealthCheck": {"status": CheckStatus},
        },
    ),
    "mha.bench/1": (
        "What mha bench prints with --json.",
        Benchmark,
        {
            "Sweep": dict.fromkeys(TIMING),
            "Benchmark": {
                "schema": None,
                "summary": list[str],
                "ceilings": list[Any],
                "controls": list[Any],
                "environment": dict[str, str | int | float | None],
            },
        },
    ),
}
"""By schema: what prints it, its type, and how the printed objects differ from their types: None
takes a field out, ... only makes it optional."""


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
            field: schema
            for field, schema in part["properties"].items()
            if change.get(field, ...) is not None
        }
        for (
            schema
        ) in properties.values():  # what is printed has all fields, those with a default too
            schema.pop("default", None)
        required = [field for field in properties if f"{field}?" not in change]
        parts[owner] = {"type": "object", "properties": properties, "required": required}
    whole = parts.pop(top["$ref"].rpartition("/")[2])
    fields = described_fields() if kind is Record else {}
    properties = {
        field: {"description": fields[field], **schema} if field in fields else schema
        for field, schema in whole["properties"].items()
    }
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": description,
    }
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
