"""The rows of a unit: one for each document, layer and head, as Parquet or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mhacli.commands.scan.settings import RowFormat
from mhacli.commands.scan.statistics import EFFECTS
from mhacli.commands.scan.sums import UnitDocument
from mhacli.record.effect import Effect
from mhacli.record.heads import HeadStatistics
from mhacli.record.tables import Column, EffectTable, HeadTable, Table


@dataclass(frozen=True)
class DocumentTable(Table):
    """The heads of documents. The columns are `file`, `place` (line or row from 1, 0 for a whole file), `n_documents` (1)
    and `n_tokens`, those of `HeadTable`, and the effects of removing the head, if `effects` has them."""

    documents: Sequence[tuple[UnitDocument, Sequence[HeadStatistics]]]
    effects: Sequence[Effect] = ()

    def columns(self) -> Mapping[str, Column]:
        """The columns by name."""
        rows = [(document, head) for document, heads in self.documents for head in heads]
        types = {"file": str, "place": int, "n_documents": int, "n_tokens": int}
        columns = {
            name: Column(kind, [getattr(document, name) for document, _ in rows]) for name, kind in types.items()
        }
        columns |= HeadTable(head for _, head in rows).columns()
        changes = EffectTable(self.effects).columns() if self.effects else {}
        return columns | {name: changes[name] for name in EFFECTS if name in changes}

    def to_bytes(self, rows: RowFormat) -> bytes:
        """The contents of the file; equal rows give equal bytes. Raises `MhaError` if Parquet needs pyarrow, which is missing."""
        if rows == "jsonl":
            encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
            return "".join(f"{encode(row)}\n" for row in self.to_dicts()).encode()
        from io import BytesIO

        table = self.to_arrow()
        from pyarrow import parquet

        file = BytesIO()
        parquet.write_table(table, file, compression="zstd")
        return file.getvalue()
