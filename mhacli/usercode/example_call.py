"""The call of an example: the arguments that it makes, and the inputs among them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.errors import UsageError

from .accepted import with_output
from .axes import MAP_AXES, AxisNames, CallSizes, MadeForSizes, for_each_text
from .build import Built, names_beside
from .door import (
    Unreadable,
    UserRaised,
    call_user,
    first_that_works,
    for_user,
    those_that_work,
)
from .roles import IN_ORDER, MASKS, ROWS, CallParameter, signature_of
from .target import find_target
from .user_attention import Changed, UserAttention

_LENGTHENING = 3
"""A second length is larger by this, and shows which axes are lengths."""
_LONG_LENGTHS = (64, 256, 4096)
"""The lengths of the text that a random argument is cut from, the longest that works: a table in
the example may be shorter."""


def example_of(text: str, built: Built) -> Callable[..., Any]:
    """An example as a function: a `lambda` in the user's words knows torch and the names of the
    target's file; else the name of a function.
    """
    if not text.lstrip().startswith("lambda"):
        return find_target(text)  # type: ignore[no-any-return]
    try:
        return call_user(eval, text, names_beside(built.thing))  # type: ignore[no-any-return]
    except UserRaised as raised:
        raise UsageError(f"--example cannot be read: {raised}") from raised.fault


def arguments_of_example(template: UserAttention, length: int) -> dict[str, Any]:
    """The arguments of the call that an example makes, by name. Raises `MhaError` if it makes
    none.
    """
    built = template.built
    made = list[dict[str, Any]]()

    def note(arguments: dict[str, Any]) -> dict[str, Any]:
        made.append(arguments)
        raise for_user(StopIteration())  # the call itself is not needed

    problem = f"does not call {built.name}"
    try:
        with torch.no_grad():
            assert template.example is not None
            lengths = (length,) if template.is_resizable else ()
            call_user(template.example, Changed(built.call, note), *lengths)
    except UserRaised as raised:
        problem = f"raises {raised}"
    if not made:
        raise built.refusal(f"--example {problem}")
    return made[0]


class _ShownCalls:
    """What an example shows in three calls: two of a length, whose arguments are `made`, and a
    `longer` one. By the names of their tensors: those that are `random`, `vectors`, and token
    `ids`. Raises `MhaError` if it makes no calls, or calls of another kind.
    """

    def __init__(self, template: UserAttention, length: int) -> None:
        self.made = made = arguments_of_example(template, length)
        again = arguments_of_example(template, length)
        self.longer = arguments_of_example(template, length + _LENGTHENING)
        if not _axes_of(made) == _axes_of(again) == _axes_of(self.longer):
            name = template.built.name
            raise Unreadable(f"--example gives {name} arguments of another kind in another call")
        tensors = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        self.random = [
            name for name, value in tensors.items() if not torch.equal(value, again[name])
        ]
        # the numbers of a mask hide or show
        self.vectors = [
            name
            for name, value in tensors.items()
            if value.ndim > 1
            and value.is_floating_point()
            and not ((value == 0) | (value == 1) | (value < -1e3)).all()
        ]
        # beside vectors, fixed whole numbers may be the numbers of these
        self.ids = [
            name
            for name, value in tensors.items()
            if value.ndim == 2
            and value.dtype in (torch.int64, torch.int32)
            and (name in self.random or not self.vectors)
        ]


def _axes_of(arguments: Mapping[str, Any]) -> dict[str, int]:
    """The number of axes of each argument, -1 if it is no tensor."""
    return {
        name: value.ndim if isinstance(value, Tensor) else -1 for name, value in arguments.items()
    }


def attentions_of_example(template: UserAttention, length: int) -> Iterator[UserAttention]:
    """The target with what its example shows: vectors beside token ids, a memory, keep their length
    where texts are shorter or longer, else change with them.
    """
    shown = attention_of_example(template, length)
    made = arguments_of_example(template, length)
    memories = {
        name: MadeForSizes(partial(for_each_text, made[name], shown.sizes.batch))
        for name in shown.others
        if made[name].ndim == 3 and made[name].is_floating_point()
    }
    yield replace(shown, others={**shown.others, **memories})
    yield shown


def attention_of_example(
    template: UserAttention, length: int, *, may_be_context: bool = False
) -> UserAttention:
    """The target with the inputs that its example shows at a length: vectors, by name where names
    tell, else in order, or token ids, those of its decoder if it has one. Random arguments of
    another kind are the same at each length. A second one that no name explains `may_be_context`:
    then it is longer than the first, which only a context may be. Raises `MhaError` without any.
    """
    built = template.built
    calls = _ShownCalls(template, length)
    slots = _slots_shown(template, calls)
    guessed = _guessed_context(template, calls, slots) if may_be_context else ()
    slots += guessed
    parts = {slot.part: calls.made[slot.name] for slot in slots}
    rows = queries = parts.get("q", calls.made[slots[0].name])
    longer = calls.longer[slots[0].name]
    if template.ids is not None:
        rows = rows[..., None]
        longer = longer[..., None]
    is_function = len(parts) == 3 and not built.weight_shapes
    is_second = built.module is not None and vars(built.module).get("batch_first", True) is False
    axes = _axes(rows.shape, longer.shape, is_function=is_function, is_second=is_second)
    keys = parts.get("k", rows)
    if keys.ndim != len(axes):
        both = f"{list(rows.shape)} and {list(keys.shape)}"
        raise Unreadable(f"--example gives {built.name} vectors with other axes: {both}")
    usual = dict.fromkeys(("batch", "column", "width", "head"), 1)
    of_queries = usual | dict(zip(axes, rows.shape, strict=True))
    of_keys = usual | dict(zip(axes, keys.shape, strict=True))
    sizes = CallSizes(
        of_queries["batch"],
        of_queries["row"] * of_queries["column"],
        of_keys["row"] * of_keys["column"],
        of_queries["width"],
        of_keys["width"],
        of_queries["head"] if is_function else 0,
    )
    if guessed:
        sizes = sizes._replace(k_len=sizes.k_len + _LENGTHENING)
    others = dict[str, Any]()
    if template.is_resizable and "column" not in axes:
        rows_of = [slot.name for slot in slots]
        rest = [name for name in calls.random if name not in rows_of]
        others = _at_each_length(template, calls, rest, sizes)
    return replace(
        template,
        slots=slots,
        axes=axes[: queries.ndim],
        others=others,
        sizes=sizes,
        is_copied=template.ids is None,
    )


def _slots_shown(template: UserAttention, calls: _ShownCalls) -> tuple[CallParameter, ...]:
    """The parameters to which an example gives its vectors or its token ids. Raises `MhaError` if
    there is none.
    """
    built = template.built
    vectors = calls.vectors
    ids = calls.ids
    if template.ids is not None:
        names = [slot.name for slot in template.slots if slot.name in ids] or ids[:1]
        roles = dict.fromkeys(names, "x")
    else:
        known = {p.name: p.role for p in signature_of(built.call, *ROWS)}
        roles = {name: known[name] for name in vectors if name in known}
        roles = roles or dict(zip(vectors, IN_ORDER.get(len(vectors), ("x",)), strict=False))
    if roles:
        return tuple(CallParameter(name, role, True) for name, role in roles.items())
    if ids and template.is_resizable:
        message = f"{built.name} gives no output for each token id of --example"
        raise built.refusal(message, "give ids [text, token], or [token, text]")
    hint = "token ids take any length: lambda m, T: m(torch.randint(9, (2, T)))"
    raise built.refusal(f"--example gives {built.name} no vectors", hint if ids else None)


def _guessed_context(
    template: UserAttention, calls: _ShownCalls, slots: tuple[CallParameter, ...]
) -> tuple[CallParameter, ...]:
    """The one parameter beside the inputs to which an example gives vectors of as many axes."""
    n_axes = [calls.made[slot.name].ndim for slot in slots]
    unknown = [
        p
        for p in template.parameters("unknown")
        if p.name in calls.vectors and [calls.made[p.name].ndim] == n_axes
    ]
    is_one = len(unknown) == 1 and unknown[0].name != slots[0].name and template.ids is None
    return (CallParameter(unknown[0].name, "context", True),) if is_one else ()


def _at_each_length(
    template: UserAttention, calls: _ShownCalls, names: Sequence[str], sizes: CallSizes
) -> dict[str, MadeForSizes]:
    """The random arguments of these names at the length of each call, which is that of `sizes` in
    the first: the beginning of what the example gives for a long text.
    """
    if not names:
        return {}
    longer = those_that_work(_LONG_LENGTHS, partial(arguments_of_example, template))
    most = [calls.made, *longer][-1]
    arguments = {}
    for name in names:
        shapes = [*zip(calls.made[name].shape, calls.longer[name].shape, strict=True)]
        beginning = partial(_beginning, most[name], shapes, sizes.q_len, sizes.batch)
        arguments[name] = MadeForSizes(beginning)
    return arguments


def _beginning(
    most: Tensor, shapes: Sequence[tuple[int, int]], length: int, n_texts: int, sizes: CallSizes
) -> Tensor:
    """A random argument of an example at the length of a call, the same for each text: the
    beginning of that of the longest text, by its shapes at a length and at a longer one. Raises
    `Unreadable` for a longer text than that.
    """
    for dim, (size, longer) in enumerate(shapes):
        needed = size + (longer - size) * (sizes.q_len - length) // _LENGTHENING
        if not 0 <= needed <= most.shape[dim]:
            raise Unreadable(f"--example gives nothing for a text of {sizes.q_len} tokens")
        most = most.narrow(dim, 0, needed)
    return for_each_text(most, n_texts, sizes)


def _axes(
    shape: torch.Size, longer: torch.Size, *, is_function: bool, is_second: bool
) -> AxisNames:
    """The axes of the inputs: a length is what differs in a longer text, else it stands where it
    usually does; of a map, the channels stand before it or, as two equal axes show, behind it.
    Raises `Unreadable` for more axes.
    """
    if not 2 <= len(shape) <= 4:
        raise Unreadable(f"--example gives vectors {list(shape)}, of {len(shape)} axes")
    sizes = enumerate(zip(shape, longer, strict=True))
    changing = [dim for dim, (size, other) in sizes if size != other]
    if len(shape) == 4 and (len(changing) == 2 or (not changing and not is_function)):
        is_behind = changing == [1, 2] or (not changing and shape[1] == shape[2] != shape[3])
        return ("batch", "row", "column", "width") if is_behind else MAP_AXES
    usual = 0 if len(shape) == 3 and is_second else len(shape) - 2
    axes = {2: ["width"], 3: ["batch", "width"], 4: ["batch", "head", "width"]}[len(shape)]
    axes.insert(changing[0] if changing else usual, "row")
    return tuple(axes)


# ------------------------------------------------------------------------------ an example to give


_SHAPES = (
    "torch.randn(2, T, {})",
    "torch.randn(T, {})",
    "torch.randn(2, {}, T)",
    "torch.randn(2, T, T, {})",
    "torch.randn(2, 4, 4, {})",
    "torch.randn(2, 1, T, {})",
    "torch.randn({}, T)",
    "torch.randn(2, 3, 224, 224)",
    "torch.randn(2, 3, 32, 32)",
    "torch.randn(2, 3, 28, 28)",
)
"""The vectors or images of an example that a refusal gives, the first that works."""
_OTHERS = (
    "torch.ones(2, dtype=torch.long)",
    "torch.randn(2, {})",
    "torch.randn(2, 9, {})",
    "None",
    "1",
    "",
)
"""What it gives for other arguments: a number or a vector for each text, a memory, nothing, a
number, or what it gives first."""
_UNUSUAL_LENGTH = 11
"""The length at which it is tried, which is no other size."""
_MOST_EXAMPLES = 200
"""The most of them that are tried: no clock decides which is found."""
_MOST_OF_LAYERS = 60
"""The most orders of what the layers take: five layers have 120."""


def working_example(template: UserAttention, widths: Sequence[int]) -> str | None:
    """The first call that works, written for `--example`."""
    built = template.built
    needed = [p for p in signature_of(built.call) if p.required]

    def working(arguments: Sequence[str]) -> str:
        first, *rest = arguments
        others = zip(needed[1:], rest, strict=True)
        words = [first, *("None" if p.role in MASKS else word for p, word in others)]
        parameters = "m, T" if "T" in first else "m"
        text = f"lambda {parameters}: m({', '.join(words)})"
        ids = torch.arange(built.n_ids) if "randint" in first else None
        example = replace(template, example=example_of(text, built), ids=ids)
        attention = attention_of_example(example, _UNUSUAL_LENGTH)
        with_output(replace(attention, is_inside=ids is not None))
        return text

    calls = _arguments_to_try(built, len(needed), widths)
    return first_that_works(islice(calls, _MOST_EXAMPLES), working)


def _arguments_to_try(
    built: Built, n_needed: int, widths: Sequence[int]
) -> Iterator[Sequence[str]]:
    """The arguments in words: each is what a layer of the module itself takes, first with several
    widths, or an input of one of the widths stands beside others that are alike.
    """
    layers = [] if built.module is None else [*built.module.children()]
    linear = [part for part in layers if isinstance(part, nn.Linear)]
    tables = [part for part in layers if isinstance(part, nn.Embedding)]
    of_layers = [f"torch.randn(2, T, {part.in_features})" for part in linear]
    of_layers += [f"torch.randint({part.num_embeddings}, (2, T))" for part in tables]
    unlike = list[tuple[str, ...]]()
    if n_needed:
        orders = permutations(of_layers, n_needed)
        unlike += islice(orders, _MOST_OF_LAYERS)
    yield from (call for call in unlike if len({word for word in call if "randn" in word}) > 1)
    firsts = [f"torch.randint({built.n_ids}, (2, {length}))" for length in ("T", 256, 64, 16)]
    firsts += [shape.format(width) for width in widths for shape in _SHAPES]
    for other, first in product(_OTHERS if n_needed > 1 else [""], firsts):
        yield [first] + [other.format(widths[0]) or first] * (n_needed - 1)
    yield from unlike
