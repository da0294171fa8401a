"""Who may see whom, as the user states it (`--sees`), and who does: by cell, by layer and head.

A token that is replaced changes the outputs that see it. Attention that shows its weights is read
besides, layer by layer and head by head, because what a model as a whole lets through is composed
of what its layers do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from mhacli.attention.axes import evaluated
from mhacli.attention.core import dtype_name, four_axes
from mhacli.attention.stages import Inputs
from mhacli.conditions import SEES, Condition, names_in
from mhacli.errors import UsageError
from mhacli.models.capture import Call, captured
from mhacli.models.layer_names import is_attention
from mhacli.models.masking import as_attention
from mhacli.record.checks import TOLERANCES
from mhacli.usercode.door import NO_ANSWER, UserRaised, call_user
from mhacli.usercode.masks import MaskForm
from mhacli.usercode.target import named_object
from mhacli.usercode.user_attention import InputDrawer, UserAttention

from .result import CheckRequest, Finding, SeenCells, finding_of

Cells = Bool[Tensor, "head query key"]
"""Which query sees which key; the axis of heads is 1 where all see the same."""
LENGTHS = (64, 640)
"""The least and the largest length of the texts whose cells are compared."""
_LONG = 1024
"""A length at which rules show that shorter texts hide."""
_BEYOND = 8
"""How many tokens further than twice its largest number a statement is looked at."""
_N_TEXTS = 32
"""Texts of one call, each with another token replaced."""
_N_DRAWS = 2
"""How often each token is replaced: where attention is sharp, another one reaches few outputs."""
_SMALL = 0.1
"""The size of equal tokens, whose scores are small."""
_MOST_GROUPS = 6
"""The most groups of wrong cells in a sentence."""
_MOST_KEPT = 32
"""The most matrices in a document."""
_MOST_HEADS = 64
_MOST_LAYERS = 64
"""The most heads and layers that a statement may tell apart."""
_LONGEST_DRAWN = 512
"""The longest text whose matrices are kept."""


# ------------------------------------------------------------------------------------ the statement


class Documents(NamedTuple):
    """Documents in one row: their lengths in a text of a length, the arguments of a call for
    documents of some lengths in a number of equal texts, and whether they fit one text alone.
    """

    lengths: Callable[[int], Sequence[int]]
    arguments: Callable[[Sequence[int], int], Mapping[str, Any]]
    of_one_row: bool


@dataclass(frozen=True)
class Statement:
    """Who may see whom: by a condition, or by a `predicate` of places, as `attend` takes it.
    Without `documents` a text is one document.
    """

    condition: Condition | None
    predicate: Callable[..., object] | None = None
    documents: Documents | None = None

    @property
    def has_documents(self) -> bool:
        """Whether it tells documents apart."""
        return self.condition is not None and SEES.rows in names_in(self.condition.body)

    def cells(self, q_len: int, k_len: int, *, n_heads: int = 1, layer: int = 0) -> Cells:
        """The cells that are stated for a layer; the queries are the last of the keys. Raises
        `UsageError` for a predicate that does not give them.
        """
        q_idx = torch.arange(k_len - q_len, k_len)
        k_idx = torch.arange(k_len)
        if self.condition is None:
            cells = self._of_predicate(q_idx, k_idx)
        else:
            numbers = {
                "q": q_idx[:, None],
                "k": k_idx[None],
                "n": torch.tensor(k_len),
                "layer": torch.tensor(layer),
                "head": torch.arange(n_heads)[:, None, None],
            }
            places = {name: number.double() for name, number in numbers.items()}
            lengths = [k_len] if self.documents is None else self.documents.lengths(k_len)
            row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            row = torch.nn.functional.pad(row.double(), (1, 1), value=torch.nan)
            cells = four_axes(evaluated(self.condition.body, places, {"q": row, "k": row}, {}))
        return cells[0].expand(-1, q_len, k_len)

    def _of_predicate(self, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        """The cells that the user's predicate gives, `[1, 1 or head, query, key]`. Raises
        `UsageError` for what it raises, and for anything but a bool tensor of these places.
        """
        assert self.predicate is not None
        try:
            cells = call_user(self.predicate, q_idx, k_idx)
        except UserRaised as raised:
            raise UsageError(f"--sees: the predicate raises {raised}") from raised.fault
        shape = (1, _MOST_HEADS, len(q_idx), len(k_idx))
        has_cells = isinstance(cells, Tensor) and 2 <= cells.ndim <= len(shape)
        if isinstance(cells, Tensor) and has_cells and cells.dtype == torch.bool:
            cells = four_axes(cells)
            sizes = [(have, want) for have, want in zip(cells.shape, shape, strict=True)]
            if all(have in (1, want) for have, want in (sizes[0], *sizes[2:])):
                return cells
        given = f"{dtype_name(cells.dtype)} {[*cells.shape]}" if isinstance(cells, Tensor) else ""
        raise UsageError(
            f"--sees: the predicate gives {given or type(cells).__name__}, not who may see whom",
            hint=f"return a bool tensor [query, key], here {[len(q_idx), len(k_idx)]}",
        )

    def that_give(self, seen: Tensor, n_heads: int) -> Iterator[Callable[[int, int], Cells]]:
        """The stated cells of any lengths, of each layer where those of this length are seen."""
        known = list[Cells]()
        for layer, stated in enumerate(self._of_layers(len(seen), n_heads)):
            union = stated.any(dim=0)
            rows = union.any(dim=-1)
            is_new = not any(torch.equal(stated, other) for other in known)
            known.append(stated)
            if is_new and torch.equal(union[rows], seen[rows]):
                yield partial(self.cells, n_heads=n_heads, layer=layer)

    def _of_layers(self, length: int, n_heads: int) -> Iterator[Cells]:
        """The stated cells of each layer that it tells apart."""
        for layer in range(self.n_layers):
            yield self.cells(length, length, n_heads=n_heads, layer=layer)

    @property
    def length(self) -> int:
        """A length at which its rule shows, if it shows at any of the usual ones."""
        least, largest = LENGTHS
        number = 0 if self.condition is None else self.condition.largest(0)
        first = max(least, min(largest, 2 * number + _BEYOND))
        lengths = (first, *(each for each in (128, 256, 512) if each > first))
        return next((each for each in lengths if not self.is_hidden_at(each)), first)

    def is_hidden_at(self, length: int) -> bool:
        """Whether only longer texts show more than the plain triangle, or than all cells."""

        def is_plain(length: int) -> bool:
            cells = self.cells(length, length)
            every = torch.ones_like(cells)
            return torch.equal(cells, every) or torch.equal(cells, every.tril())

        return is_plain(length) and not is_plain(_LONG)

    def require_shown_at(self, length: int) -> None:
        """Raises `UsageError` if only longer texts show what is stated."""
        if self.is_hidden_at(length):
            message = f"--sees: in {length} tokens it says no more than q >= k, or nothing"
            raise UsageError(message, hint="--length states a length at which it shows")

    @property
    def n_layers(self) -> int:
        """How many layers it tells apart."""
        is_by_layer = self.condition is not None and "layer" in names_in(self.condition.body)
        return _MOST_LAYERS if is_by_layer else 1

    @property
    def is_triangle(self) -> bool:
        """Whether each token may see itself and all before it."""
        first, *others = self._of_layers(LENGTHS[0], _MOST_HEADS)
        return not others and torch.equal(first, torch.ones_like(first).tril())

    @property
    def hides_later(self) -> bool:
        """Whether no token may see a later one, in any layer."""
        layers = self._of_layers(LENGTHS[0], _MOST_HEADS)
        return not any(bool(cells.triu(1).any()) for cells in layers)


def statement_of(request: CheckRequest) -> Statement | None:
    """What the user states; None for nothing. Raises `UsageError` if it cannot be read."""
    if request.sees is None:
        return None
    return Statement(request.condition, named_object(request.sees))


# ---------------------------------------------------------------------------------- who sees whom


class Reach(NamedTuple):
    """Which replaced tokens move which outputs: beyond rounding, and at all."""

    seen: Cells
    touched: Cells


class Shown(NamedTuple):
    """The cells of an attention that shows its weights, with the name of its module and the number
    of its layer.
    """

    name: str
    layer: int
    cells: Cells


def cells_of(call: Call) -> Bool[Tensor, "#batch #head query key"]:
    """The cells that a call of attention lets through."""
    places = (torch.arange(n, device=call.device) for n in call.shape[2:])
    return as_attention(call).visible(*places)


@dataclass(frozen=True)
class Text:
    """A text of an attention, or of a model, that is read again and again: its lengths, the mask
    that each call is given, and how far an output moves by rounding, relative to its usual size.
    """

    subject: UserAttention
    seed: int
    q_len: int
    k_len: int
    form: MaskForm | None = None
    allowed: Tensor | None = None
    tolerance: float | None = None
    documents: Documents | None = None

    def reach(self) -> Reach:
        """What is reached by tokens among random ones, and, for vectors, among equal small ones: a
        token among these cannot change its output through its query.
        """
        drawer = self.subject.drawer(self.seed)
        bases = [self._inputs(drawer) for _ in range(_N_DRAWS)]
        found = [self._by_token(base, drawer, 1.0) for base in bases]
        if self.subject.ids is None:
            if bases[0].keys is None:
                for each in (cells for reach in found for cells in reach):
                    each.diagonal(dim1=-2, dim2=-1).fill_(False)
            equal = bases[0].map(lambda rows: _SMALL * rows[..., :1, :].expand_as(rows))
            found.append(self._by_token(equal, drawer, _SMALL))
        return Reach(*(reduce(torch.bitwise_or, planes) for planes in zip(*found, strict=True)))

    def _inputs(self, drawer: InputDrawer) -> Inputs:
        """A random text, with a context where queries and keys differ in number."""
        has_context = self.q_len != self.k_len
        inputs = drawer.inputs(
            with_context=has_context, q_len=self.q_len, k_len=self.k_len, batch=1
        )
        return inputs._replace(allowed=self.allowed)

    def _by_token(self, base: Inputs, drawer: InputDrawer, size: float) -> Reach:
        """What each token reaches when it is replaced by another one of a size."""
        seen = list[Tensor]()
        touched = list[Tensor]()
        for keys in torch.arange(self.k_len).split(_N_TEXTS - 1):
            out = self.call(_replaced(base, keys, drawer, size))
            moved = _distances(out)
            seen.append(moved > self._tolerance(out))
            touched.append(moved > 0)
        return Reach(*(torch.cat(parts).movedim(0, -1) for parts in (seen, touched)))

    def call(self, inputs: Inputs) -> Tensor:
        """The output for inputs, `[text, head, query, width]`, with one head for vectors."""
        n = len(inputs.queries)
        rows = [inputs]
        run = partial(self.subject, seed=self.seed, mask=self.form)
        if self.documents is not None:
            if self.documents.of_one_row:
                rows = [inputs.map(itemgetter(slice(i, i + 1))) for i in range(n)]
            lengths = self.documents.lengths(self.k_len)
            run = partial(run, given=self.documents.arguments(lengths, n // len(rows)))
        out = torch.cat([run(each) for each in rows])
        return out if out.ndim == 4 else out[:, None]

    def _tolerance(self, out: Tensor) -> float:
        """How far an output may move that does not see the token: as given, else by its dtype."""
        return TOLERANCES[dtype_name(out.dtype)].runs if self.tolerance is None else self.tolerance

    def shown(self) -> list[Shown]:
        """Each attention that shows its weights."""
        found = list[Shown]()
        module = self.subject.module

        def take(call: Call) -> None:
            """Keeps the cells of an attention over the whole text, from all texts together."""
            lengths = call.shape[2:]
            if lengths != (self.q_len, self.k_len) or call.kind not in ("self", "decoder"):
                return
            if call.unreadable is None:
                cells = cells_of(call).any(dim=0).cpu()
                found.append(Shown(call.name, call.layer, cells.expand(-1, *lengths)))

        if module is not None:
            with suppress(*NO_ANSWER), captured(module, take, anywhere=True):
                self.call(self._inputs(self.subject.drawer(self.seed)))
        return found


def _replaced(base: Inputs, keys: Tensor, drawer: InputDrawer, size: float) -> Inputs:
    """Copies of a text: first as it is, then for each key one with another token there."""
    n = len(keys)
    ids = drawer.attention.ids
    has_keys = base.keys is not None
    copies = base.map(lambda rows: rows.repeat(n + 1, *[1] * (rows.ndim - 1)))
    texts = torch.arange(1, n + 1)
    for rows in [copies.keys, copies.values] if has_keys else [copies.queries]:
        if rows is None:
            continue
        if ids is None:
            other = size * drawer.rows(1, context=has_keys, batch=n)[..., 0, :]
        else:
            steps = torch.randint(1, max(2, len(ids)), (n, 1), generator=drawer.generator)
            numbers = torch.searchsorted(ids, rows[texts, keys].contiguous())
            other = ids[(numbers + steps.to(ids.device)) % len(ids)]
        rows[texts, ..., keys, :] = other
    return copies


def _distances(out: Tensor) -> Tensor:
    """The distance of each row of some outputs from that of the first one, relative to its usual
    size. Numbers that are not finite count as 0: of a query that sees no key they are so in all.
    """
    rows = out.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    size = rows[0].norm(dim=-1).square().mean().sqrt()
    distances = (rows[1:] - rows[0]).norm(dim=-1)
    relative: Tensor = distances / size.clamp(min=torch.finfo(torch.float32).tiny)
    return relative


# ------------------------------------------------------------------------- what is stated and seen


@dataclass(frozen=True)
class Compared:
    """The stated and the measured cells of a layer, or of a whole model, `[head, query, key]`.
    Queries that may see no key do not count, because they have no right output, unless a mask
    itself `counts_all`.
    """

    where: str
    layer: int | None
    stated: Cells
    measured: Cells
    first: int = 0
    counts_all: bool = False

    @property
    def unstated(self) -> Cells:
        """What is seen and should not be."""
        counted = self.stated.any(dim=-1, keepdim=True) | self.counts_all
        return self.measured & ~self.stated & counted

    @property
    def missing(self) -> Cells:
        """What should be seen and is not."""
        return self.stated & ~self.measured

    @property
    def differs(self) -> bool:
        """Whether a cell is wrong."""
        return bool((self.unstated | self.missing).any())

    def documents(self) -> Iterator[SeenCells]:
        """The matrices, one for all heads where they agree."""
        n_heads = max(len(self.stated), len(self.measured))
        stated, measured = (e.expand(n_heads, -1, -1) for e in (self.stated, self.measured))
        is_alike = all((each == each[:1]).all() for each in (stated, measured))
        is_long = measured.shape[-1] > _LONGEST_DRAWN
        if is_long:
            return
        for head in range(1 if is_alike else n_heads):
            yield SeenCells(
                self.layer, None if is_alike else head, _rows(stated[head]), _rows(measured[head])
            )


def _rows(cells: Tensor) -> tuple[str, ...]:
    return tuple("".join("01"[cell] for cell in row) for row in cells.int().tolist())


@dataclass(frozen=True)
class Seeing:
    """What the comparison with a statement showed: the mistakes, the matrices, the words for what
    agrees, and the length.
    """

    findings: tuple[Finding, ...]
    cells: tuple[SeenCells, ...]
    words: str
    length: int


def seeing_of(every: Sequence[Compared], words: str) -> Seeing:
    """What compared cells show, the wrong ones first; `words` say how a model was compared."""
    findings = list[Finding]()
    for code, kind, verb in (
        ("sees-unstated", "unstated", "sees"),
        ("misses-stated", "missing", "does not see"),
    ):
        wrong = {each: getattr(each, kind) for each in every}
        places = dict[str, list[str]]()  # of the same cells
        for each, cells in wrong.items():
            if cells.any():
                places.setdefault(words_of_cells(each, cells, verb), []).append(each.where)
        if places:
            parts = (f"{'and '.join(where)}{words}" for words, where in places.items())
            findings.append(finding_of(code, "; ".join(parts)))
    words = f"who sees whom is {'not ' if findings else ''}as stated{words}"
    ordered = sorted(every, key=lambda each: not each.differs)
    matrices = (matrix for each in ordered for matrix in each.documents())
    kept = tuple(matrix for matrix, _ in zip(matrices, range(_MOST_KEPT), strict=False))
    return Seeing(tuple(findings), kept, words, max(each.stated.shape[-1] for each in every))


def words_of_cells(compared: Compared, cells: Cells, verb: str) -> str:
    """Wrong cells in words: the first, and where there are more, how many and which, by head where
    heads differ: `query 4 of head 1 sees key 5 (2 cells: head 1: query 4: keys 5, 7)`.
    """
    is_alike = (cells == cells[:1]).all()
    cells = cells[:1] if is_alike else cells
    head, query, key = cells.nonzero()[0].tolist()
    who = f"query {query + compared.first}" + ("" if is_alike else f" of head {head}")
    first = f"{who} {verb} key {key}"
    n_cells = int(cells.sum())
    if n_cells == 1:
        return first
    groups = [
        group if is_alike else f"head {n}: {group}"
        for n, each in enumerate(cells)
        for group in _groups(each, compared.first)
    ]
    n_more = len(groups) - _MOST_GROUPS
    rest = f", and {n_more} more rows" if n_more > 0 else ""
    return f"{first} ({n_cells} cells: {'; '.join(groups[:_MOST_GROUPS])}{rest})"


def _groups(cells: Cells, first: int) -> Iterator[str]:
    """The rows with wrong cells: `query 4: keys 0–3, 9`."""
    for query in cells.any(dim=1).nonzero().flatten().tolist():
        keys = cells[query].nonzero().flatten()
        runs = keys.tensor_split((keys.diff() > 1).nonzero().flatten() + 1)
        words = (f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
        yield f"query {query + first}: keys {', '.join(words)}"


# ------------------------------------------------------------------------------- the comparison


def who_sees(
    subject: UserAttention,
    statement: Statement,
    request: CheckRequest,
    *,
    longest: int | None = None,
    tolerance: float | None = None,
) -> Seeing | None:
    """The comparison of an attention, or of a model, with what is stated, over the longest text
    that it reads; None where nothing can be measured. Raises `OutOfTime`, and `UsageError` for a
    predicate.
    """
    lengths = [longest or request.length or statement.length]
    if not subject.is_resizable:
        lengths = [subject.sizes.q_len]
    lengths += [length for length in (32, 16, 8, subject.sizes.q_len) if length < lengths[0]]
    for length in lengths:
        statement.require_shown_at(length)
        text = Text(
            subject,
            request.seed,
            length,
            length,
            tolerance=tolerance,
            documents=statement.documents,
        )
        with suppress(*NO_ANSWER):
            every, words = _compared(text, statement)
            every += _behind_others(text, statement)
            return seeing_of(every, words)
    return None


def _compared(text: Text, statement: Statement) -> tuple[list[Compared], str]:
    """The cells of a text, those of each layer first, and what they are in words."""
    text, reach = _reached(text, statement)
    shown = text.shown()
    length = text.k_len
    if text.subject.ids is None and len(shown) < 2 and len(_unseen(text, shown)) < 2:
        return [_of_attention(text, reach, statement, shown)], ""
    every = list[Compared]()
    for _, n, cells in shown:
        stated = statement.cells(length, length, n_heads=len(cells), layer=n)
        every.append(Compared(f"in layer {n} ", n, stated, cells & (reach.touched | stated)))
    expected, how = _composed(text, statement, shown)
    counted = expected[None]
    if not shown:  # what reaches a key in one layer reaches it as a whole
        direct = statement.cells(length, length).any(dim=0)
        counted = expected & (reach.touched | ~direct)
    every.append(Compared("as a whole ", None, expected[None], reach.seen | counted))
    return every, f", {how}"


def _of_attention(
    text: Text, reach: Reach, statement: Statement, shown: Sequence[Shown]
) -> Compared:
    """The cells of one attention: by head where its weights show what replaced tokens do."""
    measured = reach.seen
    length = text.k_len
    for each in shown:
        others = ~torch.eye(length, dtype=torch.bool)
        union = each.cells.any(dim=0, keepdim=True)
        # what stands beside the attention, such as a residual, adds the token itself
        if torch.equal(union & others, measured & others):
            measured = each.cells
    n_heads = len(measured)
    if n_heads == 1 and not text.subject.is_function:
        built = text.subject.built
        known = [value for name, value in built.arguments.items() if name.endswith("heads")]
        n_heads = known[0] if known and isinstance(known[0], int) else 1
    stated = statement.cells(text.q_len, length, n_heads=n_heads)
    if len(stated) > len(measured):
        stated = stated.any(dim=0, keepdim=True)
    return Compared("", None, stated, measured, length - text.q_len)


def _reached(text: Text, statement: Statement) -> tuple[Text, Reach]:
    """A text and what its tokens reach. An attention that hides nothing without a mask, and takes
    one of queries and keys, is given the stated cells.
    """
    reach = text.reach()
    stated = statement.cells(text.q_len, text.k_len, n_heads=text.subject.sizes.n_heads or 1)
    forms = [form for form in text.subject.mask_forms if {"query", "key"} <= {*form.axes}]
    if not forms or not bool(reach.seen.all()) or bool(stated.all()):
        return text, reach
    if len(stated) > 1 and "head" not in forms[0].axes:
        return text, reach
    masked = Text(text.subject, text.seed, text.q_len, text.k_len, forms[0], stated[None])
    return masked, masked.reach()


def _unseen(text: Text, shown: Sequence[Shown]) -> list[str]:
    """The names of the attentions of a model that show no weights, as kernels do not."""
    names = {name for name, _, _ in shown}
    found = list[str]()
    parts = [*text.subject.built.parts.items()]
    for name, part in reversed(parts[1:]):
        is_known = any(
            f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}.")
            for other in (*names, *found)
        )
        projects = any(each.ndim > 1 for each in part.parameters())  # a norm does not
        if is_attention(name, part) and not is_known and projects:
            found.append(name)
    return found


def _composed(text: Text, statement: Statement, shown: Sequence[Shown]) -> tuple[Tensor, str]:
    """What a model as a whole may let through: in each layer a token is what it was before and what
    it may see, and without a known number of layers all that follows from that.
    """
    length = text.k_len
    unseen = _unseen(text, shown)
    numbers = [n for _, n, _ in shown]
    is_known = bool(shown) and not unseen
    heads = {n: len(cells) for _, n, cells in shown}
    if not is_known:
        numbers = [*range(statement.n_layers)]
    reached = torch.eye(length, dtype=torch.bool)
    steps = [
        reached
        | statement.cells(length, length, n_heads=heads.get(n, _MOST_HEADS), layer=n).any(dim=0)
        for n in numbers
    ]
    if not is_known:
        step = reduce(torch.bitwise_or, steps)
        steps = [step] * length
    for step in steps:
        reached = (step.double() @ reached.double()) > 0
    if is_known:
        return reached, f"in {len(numbers)} attention layer{'s' * (len(numbers) != 1)}"
    return reached, "however many attention layers there are, because their number is not known"


def _behind_others(text: Text, statement: Statement) -> list[Compared]:
    """The cells of a function, or of an attention over a context, with fewer queries than keys,
    which are the last of them.
    """
    if (
        text.documents
        or not text.subject.takes_context
        or text.subject.mode == "cross"
        or text.k_len < 4
    ):
        return []
    with suppress(*NO_ANSWER):
        shorter = Text(text.subject, text.seed, text.k_len // 2, text.k_len)
        compared = _of_attention(*_reached(shorter, statement), statement, ())
        where = f"with {shorter.q_len} queries behind {compared.first} more keys "
        return [replace(compared, where=where)]
    return []
