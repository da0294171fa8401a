"""The rows of a unit: one for each document, layer and head, as Parquet or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mhacli.results.record.effect import Effect
from mhacli.results.record.head_statistics import HeadStatistics
from mhacli.results.record.tables import Column, EffectTable, HeadTable, Table
from mhacli.results.scan.settings import RowFormat
from mhacli.results.scan.statistics import EFFECTS
from mhacli.results.scan.sums import UnitDocument


@dataclass(frozen=True)
class DocumentTable(Table):
    """The heads of documents. Columns are `file`, `place` (line or row from 1, 0 for a whole file) and `n_tokens`, then those of
    `HeadTable`, and what removing the head changes, where that is known: `effects` are those of the heads, or none."""

    documents: Sequence[tuple[UnitDocument, Sequence[HeadStatistics]]]
    effects: Sequence[Effect] = ()

    def columns(self) -> Mapping[str, Column]:
        """The columns by name."""
        every = [(document, head) for document, heads in self.documents for head in heads]
        named = {"file": str, "place": int, "n_tokens": int}
        columns = {name: Column(kind, [getattr(of, name) for of, _ in every]) for name, kind in named.items()}
        columns |= HeadTable(head for _, head in every).columns()
        changes = EffectTable(self.effects).columns() if self.effects else {}
        return columns | {name: changes[name] for name in EFFECTS if name in changes}

    def to_bytes(self, rows: RowFormat) -> bytes:
        """The file of rows: the same rows give the same bytes. Raises `MhaError` where pyarrow is missing for Parquet."""
        if rows == "jsonl":
            encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
            return "".join(f"{encode(row)}\n" for row in self.to_dicts()).encode()
        from io import BytesIO

        table = self.to_arrow()
        from pyarrow import parquet

        file = BytesIO()
        parquet.write_table(table, file, compression="zstd")
        return file.getvalue()
