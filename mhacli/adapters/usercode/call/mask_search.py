"""The masks that somebody's attention accepts: each form is tried once, in a call that also tells whether the mask hides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from mhacli.adapters.usercode.asker import map_rows
from mhacli.adapters.usercode.call.convention import Written
from mhacli.adapters.usercode.call.mask_forms import KINDS, LENGTHS, Kind, Tried, mask_axes, ordered, padding_axes
from mhacli.adapters.usercode.call.results import Axes
from mhacli.adapters.usercode.call.search import Laboratory, Trial, close
from mhacli.adapters.usercode.call.signature import Parameter
from mhacli.adapters.usercode.user_attention import Answer, Inputs, MaskForm

SEEN_KEY, HIDDEN_KEY = 0, 1


class MaskSearch:
    """The forms of the masks of one call. `acting` are the parameters whose mask has changed the output so far."""

    def __init__(self, lab: Laboratory, trial: Trial, documentation: str) -> None:
        self.lab, self.trial, self.documentation = lab, trial, documentation
        self.acting: set[str] = set()
        self._open: dict[int, Tensor | None] = {}
        self.batch_second = trial.way.axes[:2] == ("row", "batch")

    def masks(self, parameter: Parameter) -> tuple[MaskForm, ...]:
        """The accepted forms of a mask of queries by keys, the likeliest first."""
        way = self.trial.way
        axes = mask_axes(
            batched=way.batched, is_function=way.is_function, n_axes=len(way.axes), batch_second=self.batch_second
        )
        kinds: tuple[Kind, ...] = ("additive",) if parameter.role == "bias" else KINDS
        return self._ordered(parameter, axes, kinds, padding=False)

    def paddings(self, parameter: Parameter) -> tuple[MaskForm, ...]:
        """The accepted forms of a mask of keys, or of lengths, the likeliest first."""
        way = self.trial.way
        found: tuple[MaskForm, ...] = ()
        if parameter.role == "lengths" and way.batched:
            found = self._ordered(parameter, (LENGTHS,), ("lengths",), padding=True)
        if found or parameter.role == "bias":
            return found
        axes = padding_axes(batched=way.batched, batch_second=self.batch_second)
        return self._ordered(parameter, axes, KINDS, padding=True)

    def _ordered(
        self, parameter: Parameter, axes: Iterable[Axes], kinds: tuple[Kind, ...], *, padding: bool
    ) -> tuple[MaskForm, ...]:
        tried = self._tried(parameter.name, axes, kinds, padding=padding)
        return ordered(tried, parameter, self.documentation) if tried else ()

    def _tried(self, name: str, axes: Iterable[Axes], kinds: tuple[Kind, ...], *, padding: bool) -> list[Tried]:
        """Every form that is accepted. Once some kinds are known to be accepted, others are not tried any more; both meanings of
        True are tried with the first axes alone."""
        tried: list[Tried] = []
        for some in axes:
            accepted = list(
                dict.fromkeys(one.form.kind for one in tried if one.form.kind != "additive" or "additive" in kinds)
            )
            here = accepted or list(kinds)
            if accepted and self.lab.is_slow:
                break
            first = not accepted
            for kind in here:
                one = self._experiment(MaskForm(name, some, kind), padding=padding)
                if one is None:
                    if not first and kind == here[0]:
                        break
                    continue
                tried.append(one)
                if first and kind in ("bool", "01", "whole") and not self.lab.is_slow:
                    other = self._experiment(MaskForm(name, some, kind, "hide"), padding=padding)
                    tried += [other] if other is not None else []
                if kind == "01":
                    added = self._experiment(MaskForm(name, some, "additive"), padding=padding) if first else None
                    tried.append(added or Tried(MaskForm(name, some, "additive"), False, False))
        return tried

    def _experiment(self, form: MaskForm, *, padding: bool) -> Tried | None:
        """One call: all sequences are the same but for one key in two of them, hidden in the one and seen in the other."""
        hidden = self.trial.lengths.k_len - 2 if form.kind == "lengths" else HIDDEN_KEY
        inputs = self._inputs(hidden, form, padding=padding)
        forms = Written(None, form) if padding else Written(form, None)
        answer = self.lab.answer(self.trial, inputs, forms)
        if answer is None and padding and form.kind != "lengths" and "query" in form.axes and self.trial.way.batched:
            answer = self._spread_answer(form, inputs, forms)
        if answer is None:
            return None
        self._note(form.parameter, inputs, hidden, answer.out)
        rows = self._rows_that_tell(answer.out, hidden)
        base, without_hidden, without_seen = rows[0], rows[1], rows[2]
        finite = bool(torch.isfinite(rows).all())
        hides = finite and close(base, without_hidden) and not close(base, without_seen)
        return Tried(form, hides, finite)

    def _note(self, name: str, inputs: Inputs, hidden: int, out: Tensor) -> None:
        """Notes a mask that changes what is answered without it."""
        if name in self.acting:
            return
        if hidden not in self._open:
            answer = self.lab.answer(self.trial, inputs._replace(allowed=None, real=None))
            self._open[hidden] = None if answer is None else answer.out
        bare = self._open[hidden]
        if bare is None or bare.shape != out.shape or not close(bare, out):
            self.acting.add(name)

    def _spread_answer(self, form: MaskForm, inputs: Inputs, forms: Written) -> Answer | None:
        """The answer with the mask of keys written for each query; the way remembers it where that is accepted."""
        way = self.trial.way
        spread = replace(self.trial, way=replace(way, spread=way.spread | {(form.parameter, form.axes)}))
        answer = self.lab.answer(spread, inputs, forms)
        if answer is not None:
            self.trial = spread
        return answer

    def _rows_that_tell(self, out: Tensor, hidden: int) -> Tensor:
        """The outputs of queries that are not themselves the changed tokens."""
        mine = [n for n in range(out.shape[-2]) if self.trial.takes_keys or n not in (SEEN_KEY, hidden)]
        return out[..., mine, :]

    def _inputs(self, hidden: int, form: MaskForm, *, padding: bool) -> Inputs:
        rows = self.lab.rows(self.trial)
        keys = rows.queries if rows.keys is None else rows.keys
        batch, k_len, q_len = self.trial.lengths.batch, keys.shape[-2], rows.queries.shape[-2]
        same = map_rows(rows, lambda tensor: tensor[:1].expand_as(tensor).clone())
        changed = [
            tensor for tensor in (same.queries if rows.keys is None else same.keys, same.values) if tensor is not None
        ]
        for tensor in changed:
            tensor[1, ..., hidden, :] = tensor[1, ..., hidden, :].flip(-1) + 0.5
            tensor[2, ..., SEEN_KEY, :] = tensor[2, ..., SEEN_KEY, :].flip(-1) + 0.5
        real = torch.ones(batch, k_len, dtype=torch.bool)
        real[:, hidden : k_len if form.kind == "lengths" else hidden + 1] = False
        if padding:
            return same._replace(real=real)
        return same._replace(allowed=real[:1, None, None, :].expand(1, 1, q_len, k_len))
