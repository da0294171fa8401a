"""The texts that the attentions of a pass read, of which only ids or lengths are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mhacli.models.calls import Call
from mhacli.models.inputs import ModelInputs
from mhacli.models.passes import Half, ModelPass, ReadIds
from mhacli.models.tokenizer import ModelTokenizer
from mhacli.settings import PaddingSide
from mhacli.text.tokens import AttentionKind, TokenSequence, named_by_ids, places

_Texts = tuple[TokenSequence, ...]


def _halves(kind: AttentionKind) -> tuple[Half, Half]:
    """The half of the model from which the queries of a kind of attention come, and that of its keys."""
    return "encoder" if kind == "encoder" else "decoder", "encoder" if kind in ("encoder", "cross") else "decoder"


@dataclass
class PassTexts:
    """The texts of a pass, as they become known. `notes` explains the substitutes for unknown tokens."""

    read: ModelPass
    tokenizer: ModelTokenizer | None
    notes: list[str] = field(default_factory=list)
    _known: dict[Half, _Texts] = field(default_factory=dict)

    def go_on(self, more: ModelPass) -> None:
        """Appends the ids of a further pass."""
        for half, new in more.halves.items():
            old = self.read.halves.get(half)
            if old is not None:
                ids, real = torch.cat([old.ids, new.ids], dim=1), torch.cat([old.real, new.real], dim=1)
                new = ReadIds(ids, real, old.are_places or new.are_places)
            self.read.halves[half] = new

    def inputs(self, call: Call) -> ModelInputs:
        """The inputs of the pass as far as this attention shows them."""
        for half, n in zip(_halves(call.kind), call.shape[2:], strict=True):
            if half not in self._known:
                self._known[half] = self._texts(half, n, call)
        context = self._known.get("encoder")
        sequences = self._known.get("decoder", context)
        assert sequences is not None
        return ModelInputs(sequences, context, self.side)

    def without_padding(self, call: Call) -> Call:
        """The attention without columns that no text reaches: a batch may be padded further than its longest text."""
        parts, is_cut = [], False
        for half, n in zip(_halves(call.kind), call.shape[2:], strict=True):
            read, longest = self.read.halves.get(half), max(len(text.ids) for text in self._known[half])
            n_real = longest if read is not None and read.ids.shape[1] == n else n
            parts.append(slice(0, n_real) if self.side == "right" else slice(n - n_real, n))
            is_cut |= n_real < n
        return call.cropped(*parts) if is_cut else call

    @property
    def side(self) -> PaddingSide:
        """The side of the padding; that of the tokenizer if there is none."""
        padded = [read.real for read in self.read.halves.values() if read.has_padding]
        if not padded:
            return self.tokenizer.side if self.tokenizer is not None else "right"
        return "right" if all(bool(real[:, 0].all()) for real in padded) else "left"

    def _texts(self, half: Half, n: int, call: Call) -> _Texts:
        read, n_texts = self.read.halves.get(half), call.shape[0]
        if read is None:
            return (places(n),) * (self.read.batch if self.read.halves else n_texts)
        size = tuple(read.ids.shape)
        if size == (n, n_texts) and n != n_texts:
            read = self.read.halves[half] = ReadIds(read.ids.T, read.real.T, read.are_places)
        elif size == (n, n) and n > 1 and call.is_token_first:
            self.notes.append(
                f"ids are {n} × {n}, and either axis may be that of the tokens: tokens are shown as positions"
            )
            return (places(n),) * n_texts
        elif size != (self.read.batch, n):
            self.notes.append(f"attention has {n} positions for {size[1]} ids: tokens are shown as positions")
        if read.are_places:
            self.notes.append("the model was given vectors, not ids: tokens are shown as positions")
            return tuple(places(len(row)) for row in self._rows(read))
        return tuple(self._text(row) for row in self._rows(read))

    def _rows(self, read: ReadIds) -> Sequence[Sequence[int]]:
        """The ids without padding, which must be on one side."""
        ids, real = read.ids.tolist(), read.real.tolist()
        n, counts = len(ids[0]), [sum(row) for row in real]
        columns = [slice(0, c) if self.side == "right" else slice(n - c, n) for c in counts]
        if not all(c and all(row[own]) for row, own, c in zip(real, columns, counts, strict=True)):
            self.notes.append("the mask hides tokens within a text, or all of them: padding is shown as tokens")
            return ids
        return [row[own] for row, own in zip(ids, columns, strict=True)]

    def _text(self, ids: Sequence[int]) -> TokenSequence:
        spelled = None if self.tokenizer is None else self.tokenizer.spelled(ids)
        if spelled is None and self.tokenizer is not None:
            self.notes.append(
                "the tokenizer has no token for some ids: it is another model's, and tokens are shown as ids"
            )
        return spelled or named_by_ids(ids)
