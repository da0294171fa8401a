"""A user's attention with the way to call it: its arguments, inputs and masks, and the output in
what it returns.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from mhacli.attention.core import dtype_name
from mhacli.attention.stages import Inputs

from .axes import (
    HEAD_AXES,
    OF_IDS,
    OF_TEXTS,
    ROW_AXES,
    AxisNames,
    CallSizes,
    at_sizes,
    axes_for,
    axis_words,
    fits,
    for_each_text,
    laid_out,
    leaves,
    output_in,
    rearranged,
    strided,
)
from .build import Built, WithoutDropout, cast_dtype, seeded
from .copies import copied
from .door import Unreadable, call_user, on_behalf, ours
from .masks import MaskForm, mask_in
from .names import never_read
from .roles import WITHOUT_EFFECT, CallParameter, signature_of
from .target import Mode

NOTHING: Mapping[str, Any] = {}
NO_CONTEXT = nullcontext[Any]()


# ----------------------------------------------------------------------------- the inputs of a call


class InputDrawer:
    """Random inputs of an attention, the same in the same order for the same seed: standard normal
    numbers in float64 on the CPU, or token ids. Inputs with a context also have separate values if
    it takes them.
    """

    def __init__(self, attention: UserAttention, seed: int) -> None:
        self.attention = attention
        self.sizes = attention.sizes
        self.generator = torch.Generator().manual_seed(seed)

    def rows(self, length: int, *, context: bool = False, batch: int | None = None) -> Tensor:
        """Token vectors of the query width, or of the context width, or token ids of width 1."""
        batch = batch or self.sizes.batch
        ids = self.attention.ids
        if ids is not None:
            chosen = torch.randint(len(ids), (batch, length, 1), generator=self.generator)
            rows = ids[chosen.to(ids.device)]
            if self.attention.end is not None:
                rows[:, -1] = self.attention.end
            return rows
        heads = (self.sizes.n_heads,) if self.sizes.n_heads else ()
        width = self.sizes.d_context if context else self.sizes.d_in
        return torch.randn(
            (batch, *heads, length, width), generator=self.generator, dtype=torch.float64
        )

    def inputs(
        self,
        *,
        with_context: bool,
        q_len: int | None = None,
        k_len: int | None = None,
        batch: int | None = None,
    ) -> Inputs:
        """Inputs for self-attention where the widths allow it. `with_context`, and for a function
        of q, k and v, the keys are a separate sequence of another length.
        """
        q_len = q_len or self.sizes.q_len
        k_len = (k_len or self.sizes.k_len) if with_context else q_len
        is_function = self.attention.is_function
        queries = self.rows(q_len, batch=batch)
        if not with_context and not is_function and self.sizes.d_in == self.sizes.d_context:
            return Inputs(queries)
        keys = self.rows(k_len, context=True, batch=batch)
        values = None
        if is_function or (with_context and self.attention.n_rows > 2):
            values = self.rows(k_len, context=True, batch=batch)
        return Inputs(queries, keys, values)

    def replaced(self, inputs: Inputs, key: int, *, factor: float = 1.0) -> Inputs:
        """The inputs with another key and value at a position: `factor` times new random numbers.
        Without separate keys, the query changes.
        """

        def change(rows: Tensor, *, context: bool = True) -> Tensor:
            new_rows = rows.clone()
            new_rows[..., key, :] = (
                factor * self.rows(1, context=context, batch=len(rows))[..., 0, :]
            )
            return new_rows

        if inputs.keys is None:
            return inputs._replace(queries=change(inputs.queries, context=False))
        values = None if inputs.values is None else change(inputs.values)
        return inputs._replace(keys=change(inputs.keys), values=values)

    def allowed(self, inputs: Inputs) -> Tensor:
        """A random mask `[batch, 1, query, key]` that leaves each query a key, and is neither
        symmetric nor triangular.
        """
        batch, q_len, k_len = inputs.lengths
        keep = torch.rand(batch, 1, q_len, k_len, generator=self.generator) < 0.6
        keep[..., torch.arange(q_len), torch.randint(k_len, (q_len,), generator=self.generator)] = (
            True
        )
        return keep

    def real(self, inputs: Inputs, *, on_the_right: bool = True) -> Tensor:
        """Padding `[batch, key]` that differs between sequences: on the right, or anywhere, the
        first position included.
        """
        batch, _, k_len = inputs.lengths
        places = torch.arange(k_len)
        row = torch.arange(batch)[:, None]
        if not on_the_right:
            return ((places + row) % 3 != 1) | (places == k_len - 1)
        lengths = (k_len - 1 - row * max(1, k_len // 3)).clamp(min=1)
        if batch > 1:
            lengths[-1] = k_len
        return places < lengths


# ----------------------------------------------------------------------------------------- the call


@dataclass(frozen=True)
class UserAttention:
    """A user's attention that can be called.

    `sizes` are valid input sizes; `k_len` equals `q_len` for attention over the queries only. It
    computes in `dtype` on `device`. `slots` are the parameters of queries, keys and values, and
    `axes` those of each input. `ids` are the ordinary token ids, None for vectors; each text ends
    with the id `end`, if there is one. `others` are its other arguments, some of them
    `MadeForSizes`. With an `example`, a function of the callable and a length or of the callable
    alone, they are those of the call that it makes. `output` is the path and the axes of the
    output; where `is_inside`, it is what a `part` gives, or without one what the output layer
    reads, after one more token with
    `has_target`, which it only compares with.

    `forms` are the accepted forms of masks and of padding, with both meanings of True, the
    likeliest first. `mode` is self or cross, None for an attention with one mode. `is_copied`: each
    call uses a new copy of the module, so that no state remains. `is_without_dropout`: what it
    drops by torch's functions is kept. `has_graph`: outputs keep their graph of gradients.
    `is_strided`: inputs, and the gradient of the output, are views of larger tensors. `inner` is
    the dtype of 16 bits in which its code computes inside, None for none.
    """

    built: Built
    sizes: CallSizes
    dtype: torch.dtype
    device: torch.device
    slots: tuple[CallParameter, ...] = ()
    axes: AxisNames = ROW_AXES
    ids: Tensor | None = None
    end: int | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    example: Callable[..., Any] | None = None
    output: tuple[str, AxisNames] = ("", ROW_AXES)
    is_inside: bool = False
    part: str = ""
    has_target: bool = False
    forms: tuple[MaskForm, ...] = ()
    mode: Mode | None = None
    is_copied: bool = False
    is_without_dropout: bool = False
    has_graph: bool = False
    is_strided: bool = False
    inner: torch.dtype | None = None

    @property
    def module(self) -> nn.Module | None:
        """What is called, if it is a module."""
        return self.built.module

    def parameters(self, *roles: str) -> tuple[CallParameter, ...]:
        """The parameters of its call in order: all, or those with some roles."""
        return signature_of(self.built.call, *roles)

    @property
    def computed(self) -> torch.dtype:
        """The dtype in which its code computes."""
        return self.inner or self.dtype

    @property
    def is_function(self) -> bool:
        """Whether q, k and v come split into heads, and nothing is projected."""
        return self.sizes.n_heads > 0

    @property
    def is_resizable(self) -> bool:
        """Whether it takes texts of any length."""
        return self.example is None or len(inspect.signature(self.example).parameters) > 1

    @property
    def mask_forms(self) -> tuple[MaskForm, ...]:
        """The forms of masks of queries and keys."""
        return tuple(form for form in self.forms if not form.is_padding)

    @property
    def padding_forms(self) -> tuple[MaskForm, ...]:
        """The forms of padding."""
        return tuple(form for form in self.forms if form.is_padding)

    @property
    def is_pooled(self) -> bool:
        """Whether its output is of a whole text, not of each token."""
        return self.output[1] == OF_TEXTS

    @property
    def has_own_queries(self) -> bool:
        """Whether it makes its queries itself, and is given keys and values alone."""
        return not all(slot.name for slot in self.slots)

    @property
    def is_named(self) -> bool:
        """Whether names say what its inputs are, so that a second one is a context."""
        unknown = {p.name for p in self.parameters("unknown")}
        return unknown.isdisjoint(slot.name for slot in self.slots)

    @property
    def is_turned(self) -> bool:
        """Whether it is called with another value of its causal switch than by default."""
        return self.mode in ("causal", "full")

    @property
    def n_rows(self) -> int:
        """The number of arguments for queries, keys and values."""
        return len({part for slot in self.slots for part in slot.part})

    @property
    def takes_context(self) -> bool:
        """Whether keys may be a separate sequence of another length."""
        return self.n_rows > 1 and self.sizes.q_len != self.sizes.k_len

    @property
    def causal_by(self) -> str | None:
        """The argument that makes it causal."""
        names = [switch.name for switch in self.parameters("causal")]
        return next((name for name in names if self.others.get(name) is True), None)

    @property
    def untried(self) -> tuple[str, ...]:
        """The arguments that always keep their defaults, though they may change the output, and
        what follows a part that is read.
        """
        behind = [f"what follows {self.part}"] if self.part else []
        if self.example is not None:
            return (*behind,)
        passed = {slot.name for slot in self.slots} | {form.parameter for form in self.forms}
        passed |= {name for name, value in self.others.items() if value is not None}
        return (  # an offset is passed, but always 0
            *(p.name for p in self._effective if p.name not in passed or p.role == "offset"),
            *behind,
        )

    @property
    def unread(self) -> tuple[str, ...]:
        """The arguments that its source never reads."""
        unread = never_read(self.built.call)
        return tuple(p.name for p in self._effective if p.name in unread)

    @property
    def _effective(self) -> list[CallParameter]:
        """The parameters whose values may change the output."""
        return [p for p in self.parameters() if p.role not in WITHOUT_EFFECT]

    @property
    def canonical(self) -> AxisNames:
        """Our order of axes for its inputs and its output."""
        return HEAD_AXES if self.is_function else ROW_AXES

    def drawer(self, seed: int) -> InputDrawer:
        """Random inputs, the same for the same seed."""
        return InputDrawer(self, seed)

    def __call__(self, inputs: Inputs, *, seed: int | None = None, **how: Any) -> Tensor:
        """A copy of the output for inputs of any dtype and device, called as `result` calls; `seed`
        seeds torch's generators. Raises `UserRaised`, and `Unreadable` without an output.
        """
        with nullcontext() if seed is None else seeded(seed, self.device):
            result = self.result(inputs, **how)
        return self.read(result, self.sizes_of(inputs))

    def result(
        self,
        inputs: Inputs,
        *,
        mask: MaskForm | None = None,
        training: bool = False,
        given: Mapping[str, Any] = NOTHING,
        start: int = 0,
        within: AbstractContextManager[Any] = NO_CONTEXT,
    ) -> Any:
        """What the call returns. `inputs.allowed` and `inputs.real` need a `mask`. The arguments
        that are `given` are passed instead of its own; the first token has the position `start`.
        The user's code runs `within` a context.
        """
        sizes = self.sizes_of(inputs)._replace(start=start, training=training)
        others = {
            name: at_sizes(value, sizes) for name, value in self.others.items() if name not in given
        }
        passed = {**others, **self._rows(inputs)}
        if mask is not None and (inputs.allowed is not None or inputs.real is not None):
            passed[mask.parameter] = mask_in(mask, inputs.allowed, inputs.real, sizes)
        arguments = {**tree_map_only(Tensor, self.here, passed), **given}
        if self.is_strided:
            names = [slot.name for slot in self.slots if slot.name in arguments]
            arguments |= {name: strided(arguments[name]) for name in names}
        call = copied(self.built.call) if self.is_copied else self.built.call
        inside = _RowsInside(self, sizes)
        watched = self.module if self.is_inside else None
        with (
            _quietly(self.built, call, arguments, training=training, has_graph=self.has_graph),
            watching(watched, inside.note),
            self.computing(),
            within,
        ):
            result = self._of_arguments(call, arguments, sizes)
        return (result, inside.last) if self.is_inside else result

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The kernels and the dropout with which its code runs, also where the backward pass
        computes anew.
        """
        # the other kernels of torch misread a mask in float32 beside float64
        kernel = sdpa_kernel(SDPBackend.MATH) if self.dtype == torch.float64 else NO_CONTEXT
        dropout = WithoutDropout() if self.is_without_dropout else NO_CONTEXT
        with kernel, dropout:
            yield

    def _of_arguments(
        self, call: Callable[..., Any], arguments: dict[str, Any], sizes: CallSizes
    ) -> Any:
        """What the call returns for these arguments, as the example makes it if there is one. What
        an example draws is the same in every call.
        """
        if self.example is not None:
            state = torch.get_rng_state()

            def fitted(tensor: Tensor) -> Tensor:
                return self.here(for_each_text(tensor, self.sizes.batch, sizes))

            def given(theirs: dict[str, Any]) -> dict[str, Any]:
                torch.set_rng_state(state)
                with torch._C.DisableTorchFunction():  # these copies are no part of the user's code
                    return {**tree_map_only(Tensor, fitted, theirs), **arguments}

            torch.default_generator.manual_seed(0)
            length = sizes.k_len if self.has_own_queries else sizes.q_len
            lengths = (length,) if self.is_resizable else ()
            return call_user(self.example, Changed(call, given), *lengths)
        unnamed = [slot.name for slot in self.slots if slot.positional_only]
        rows = [arguments.pop(name) for name in unnamed if name in arguments]
        return call_user(call, *rows, **arguments)

    def read(self, result: Any, sizes: CallSizes) -> Tensor:
        """A copy of the output in a result, in our order of axes; that of a whole text as of one
        token. Raises `Unreadable` without one.
        """
        path, axes = self.output
        tensors = dict(leaves(result))
        if self.is_pooled:
            if path not in tensors or tensors[path].ndim < 2:
                raise Unreadable(f"the call returns no {path or 'output'} of each text")
            return tensors[path].detach().flatten(1)[:, None].clone()
        is_of_other = path not in tensors or tensors[path].ndim != len(axes)
        if is_of_other or (self.has_own_queries and not fits(tensors[path].shape, axes, sizes)):
            found = output_in(result, [axes], sizes)
            if found is None:
                shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors.values())
                raise Unreadable(
                    f"texts [{sizes.batch}, {sizes.q_len}] give {shapes or type(result).__name__},"
                    f" not an output [{', '.join(axes)}]"
                )
            path = found[0]
        output = tensors[path] if self.has_graph else tensors[path].detach()
        output = strided(output) if self.is_strided else output
        if "token" in axes:
            output = output[1:].unflatten(0, (sizes.batch, sizes.q_len))
            axes = ("batch", "row", *axes[1:])
        return rearranged(output, axes, self.canonical).contiguous().clone()

    def sizes_of(self, inputs: Inputs) -> CallSizes:
        """The sizes of a call with these inputs."""
        batch, q_len, k_len = inputs.lengths
        sizes = self.sizes._replace(batch=batch, q_len=q_len, k_len=k_len)
        if self.is_function:
            shape = inputs.queries.shape
            sizes = sizes._replace(n_heads=shape[1], d_in=shape[-1])
        return sizes

    def with_call(self, call: Callable[..., Any]) -> UserAttention:
        """The same for another copy of the callable."""
        return replace(self, built=replace(self.built, call=call), is_copied=False)

    def _rows(self, inputs: Inputs) -> dict[str, Tensor]:
        """The token vectors of a call, by parameter; without those that self-attention may omit."""
        rows = {}
        for slot in self.slots:
            is_given = slot.required or slot.part == "q" or inputs.keys is not None
            if slot.name and is_given:
                given = [inputs.rows_of(part) for part in slot.part]
                if self.has_target:
                    given = [torch.cat([each, each[:, :1]], dim=1) for each in given]
                rows[slot.name] = laid_out(given, self.canonical, self.axes)
        return rows

    def here(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on this device, in this dtype."""
        return tensor.to(self.device, cast_dtype(tensor, self.dtype), copy=True).contiguous()

    # ----------------------------------------------------------------------------- the call as text

    @property
    def example_text(self) -> str:
        """The call as an `--example`."""
        first = self.parameters()[0].name
        rows = list[str]()
        for slot in filter(attrgetter("name"), self.slots):
            width = self.sizes.d_in if slot.part == "q" else self.sizes.d_context
            lengths = {"batch": 2, "head": self.sizes.n_heads, "width": width}
            lengths["part"] = len(slot.part)
            axes = axes_for(slot.part, self.axes)
            shape = ", ".join(str(lengths.get(axis, "T")) for axis in axes)
            made = f"torch.randn({shape})"
            if self.ids is not None:
                made = f"torch.randint({len(self.ids)}, ({shape}))"
            is_first = slot.name == first and not rows
            rows.append(made if slot.positional_only or is_first else f"{slot.name}={made}")
        return f"lambda m, T: m({self.arguments_text(rows)})"

    @property
    def described(self) -> str:
        """The call as one line of Python, with a comment on layouts."""
        call = self.built.call
        path, axes = self.output
        usual = self.canonical
        of_result = self.axes
        if self.ids is not None:
            usual = OF_IDS
            of_result = (*self.axes, "width")
        notes = []
        if self.axes != usual:
            notes.append(f"rows [{axis_words(self.axes)}]")
        if not self.is_resizable:
            notes.append(f"only at length {self.sizes.q_len}")
        if axes != of_result:
            notes.append(f"result [{axis_words(axes)}]")
        if self.is_inside:
            notes.append("what its output layer reads")
            path = ""
        rows = [slot.part if slot.name.startswith("args[") else slot.name for slot in self.slots]
        masks = [form.parameter for form in sorted(self.forms, key=lambda form: form.is_padding)]
        name = "forward" if isinstance(call, nn.Module) else getattr(call, "__name__", "__call__")
        comment = f"  # {'; '.join(notes)}" if notes else ""
        return f"{name}({self.arguments_text(rows, masks)}){path}{comment}"

    def arguments_text(self, rows: Sequence[str], masks: Sequence[str] = ()) -> str:
        """The arguments of a call behind those for token vectors: tensors of one number, or a
        triangle of it, for two texts of length T, and `…` for what takes more than a word.
        """
        words = {self.sizes.batch: "2", self.sizes.q_len: "T", self.sizes.k_len: "T"}
        texts = {
            p.name: getattr(self.others[p.name], "text", "")
            or _text_of(at_sizes(self.others[p.name], self.sizes), words)
            for p in self.parameters()
            if p.name in self.others
        }
        texts |= dict.fromkeys(masks, "…")
        return ", ".join([*rows, *(f"{name}={text}" for name, text in texts.items())])


def _text_of(value: Any, words: Mapping[int, str]) -> str:
    """A value as code, with words for sizes; of tensors one of one number, or a triangle of it,
    such as a mask, and `…` for any other.
    """
    if not isinstance(value, Tensor) or value.ndim < 2:
        text = repr(value)
        return "…" if "tensor(" in text else text
    number = max(value.flatten().tolist(), key=abs)
    full = torch.full_like(value, number)
    shape = ", ".join(words.get(size, str(size)) for size in value.shape)
    word = words.get(number, str(number).replace("inf", "torch.inf"))
    text = f"torch.full(({shape}), {word})"
    made = {text: full, f"{text}.tril()": full.tril(), f"{text}.triu(1)": full.triu(1)}
    return next((text for text, each in made.items() if torch.equal(each, value)), "…")


@dataclass(frozen=True)
class _RowsInside:
    """What the parts of a model give for each token of a call, as long as it goes on with the same
    tokens.
    """

    attention: UserAttention
    sizes: CallSizes
    outputs: list[Tensor] = field(default_factory=list)

    def note(self, name: str, part: nn.Module, _inputs: Any, output: Any) -> None:
        """Keeps the output of a part, or forgets those before other rows, such as a summary."""
        output = output[0] if isinstance(output, tuple) and output else output
        if self.attention.part:
            if name == self.attention.part and isinstance(output, Tensor):
                self.outputs[:] = [output.clone()]
            return
        is_of_part = isinstance(output, Tensor) and part is not self.attention.module
        if not is_of_part or output.is_nested or output.ndim != 3:
            return
        axes = self.attention.axes
        lengths = [*output.shape]
        batch = lengths.pop(axes.index("batch"))
        if batch == self.sizes.batch and not {1, self.sizes.q_len} & {*lengths}:
            self.outputs.clear()
        if fits(output.shape, (*axes, "width"), self.sizes):
            self.outputs.append(output.clone())  # which may be changed in place

    @property
    def last(self) -> Tensor:
        """What the output layer reads. Raises `Unreadable` if no part has an output of a token."""
        if not self.outputs:
            name = self.attention.built.name
            raise Unreadable(f"no part of {name} gives an output of each token")
        return self.outputs[-1]


@contextmanager
def _quietly(
    built: Built,
    call: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    training: bool,
    has_graph: bool,
) -> Iterator[None]:
    """A call that is reported as a stage: without warnings, with gradients only if it `has_graph`,
    and with a module in `train` or `eval` mode. Norms over the batch always are as in evaluation,
    for they would keep what they saw.
    """
    given = [
        f"{name} {[*each.shape]} {dtype_name(each.dtype)}"
        for name, each in arguments.items()
        if isinstance(each, Tensor)
    ]
    built.stage(f"calling {built.name}", call=", ".join(given))
    modes = {part: part.training for part in call.modules()} if isinstance(call, nn.Module) else {}
    buffers = [
        (part, *item, item[1].clone())
        for part in modes
        for item in part.named_buffers(recurse=False)
        if training
    ]
    with warnings.catch_warnings(action="ignore"), torch.set_grad_enabled(has_graph):
        try:
            for part in modes:
                part.training = training and not isinstance(part, nn.modules.batchnorm._BatchNorm)
            yield
        finally:
            built.stage(f"examining {built.name}", limited=False)
            for part, mode in modes.items():
                part.training = mode
            # training may change the numbers of a buffer, or put another one in its place
            for part, name, buffer, values in buffers:
                setattr(part, name, buffer if buffer.equal(values) else buffer.copy_(values))


def watching(
    module: nn.Module | None, note: Callable[[str, nn.Module, tuple[Any, ...], Any], None]
) -> RemovableHandle:
    """Notes, as a context, the name, the inputs and the output of each part of a module, in the
    order in which they end.
    """
    names = {} if module is None else {part: name for name, part in module.named_modules()}

    @ours()
    def hook(
        part: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Any
    ) -> None:
        if part in names:
            note(names[part], part, (*inputs, *named.values()), output)

    return register_module_forward_hook(hook, with_kwargs=True)


@dataclass(frozen=True)
class Changed:
    """A callable with the arguments that `change` gives for those of each call, by name; its
    attributes are as before.
    """

    call: Callable[..., Any]
    change: Callable[[dict[str, Any]], dict[str, Any]]

    @ours(instead=lambda self, *positional, **keywords: self.call(*positional, **keywords))
    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """What it returns for the changed arguments."""
        names = [p.name for p in signature_of(self.call) if p.role not in ("rest", "any")]
        names += [f"args[{n}]" for n in range(len(names), len(positional))]
        given = dict(zip(names, positional, strict=False))
        arguments = self.change({**given, **keywords})
        return on_behalf(self.call, *[arguments.pop(name) for name in given], **arguments)

    @ours()
    def __getattr__(self, name: str) -> Any:
        """An attribute of the callable, such as a config."""
        return on_behalf(getattr, self.call, name)
