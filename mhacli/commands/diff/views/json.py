"""The comparison of two records as one JSON document, schema `mha.diff/1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mhacli.commands.diff.result import Differences, SiteDifference, TextDifference, TokenChange
from mhacli.commands.diff.views.words import texts_of, verdict_text
from mhacli.io.data import plain
from mhacli.record.record import Record
from mhacli.render.json import field
from mhacli.text.escape import without_surrogates

SCHEMA = "mha.diff/1"


def json_pieces(
    differences: Differences, records: tuple[Record, Record], names: tuple[str, str], command: tuple[str, ...]
) -> Iterator[str]:
    """The document with one top-level field per line, in ASCII. Non-finite numbers are null."""
    fields = diff_document(differences, records, names, command)
    yield "{" + ",\n".join(field(name, value) for name, value in fields.items()) + "}\n"


def diff_document(
    differences: Differences, records: tuple[Record, Record], names: tuple[str, str], command: tuple[str, ...] = ()
) -> Mapping[str, object]:
    """The document as JSON values."""
    a, b = records
    first = differences.first
    return {
        "schema": SCHEMA,
        "command": command,
        "verdict": differences.verdict,
        "summary": differences.summary,
        "said": verdict_text(differences, a, b),
        "a": without_surrogates(names[0]),
        "b": without_surrogates(names[1]),
        "tolerance": {"relative": differences.tolerance, "of_dtype": differences.dtype},
        "first": None if first is None else {"where": first.where, **_named_site(first.layer, first.site)},
        "first_site": None if (numbers := differences.first_site) is None else _named_site(numbers.layer, numbers.site),
        "settings": [asdict(setting) for setting in differences.settings],
        "n_sequences": differences.n_sequences,
        "texts": [_text(text, a, b) for text in differences.texts],
        "layers": [
            {
                "layer": layer.label,
                "sites": [_site(site) for site in layer.sites],
                "heads": [asdict(change) for change in layer.heads],
                "only_a": layer.only_a,
                "only_b": layer.only_b,
            }
            for layer in differences.layers
        ],
        "only_a": differences.only_a,
        "only_b": differences.only_b,
        "effects": plain(differences.effects),
    }


def _named_site(layer: str, site: SiteDifference | None) -> dict[str, Any]:
    return {"layer": layer, "site": None if site is None else site.site}


def _site(site: SiteDifference) -> dict[str, Any]:
    return asdict(site) | {"relative": site.relative}


def _text(text: TextDifference, a: Record, b: Record) -> dict[str, Any]:
    counts = {
        "n_aligned": text.n_aligned,
        "is_same": text.is_same,
        "n_replaced": sum(match.length for match in text.replaced),
    }
    return asdict(text) | counts | {"changes": [_change(text, change, a, b) for change in text.changes]}


def _change(text: TextDifference, change: TokenChange, a: Record, b: Record) -> dict[str, Any]:
    text_a, text_b = texts_of(text, a, b)
    tokens_a, tokens_b = text_a.tokens[change.a_begin : change.a_end], text_b.tokens[change.b_begin : change.b_end]
    return asdict(change) | {"a": [*map(without_surrogates, tokens_a)], "b": [*map(without_surrogates, tokens_b)]}
