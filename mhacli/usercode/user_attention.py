"""A user's attention with the way to call it: its arguments, inputs and masks, and the output in
what it returns.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only
from torch.utils.hooks import RemovableHandle

from mhacli.attention.stages import Inputs
from mhacli.usercode.build import Built, WithoutDropout, cast_dtype, copied, seeded
from mhacli.usercode.door import Unreadable, call_user, on_behalf, ours
from mhacli.usercode.names import never_read
from mhacli.usercode.roles import WITHOUT_EFFECT, CallParameter, signature_of
from mhacli.usercode.target import Mode

AxisNames = tuple[str, ...]

OF_IDS: AxisNames = ("batch", "row")
ROW_AXES: AxisNames = ("batch", "row", "width")
HEAD_AXES: AxisNames = ("batch", "head", "row", "width")
OF_TEXTS: AxisNames = ("batch",)
"""The axes of an output that is of a whole text, whatever else it has."""
PATTERN_AXES: AxisNames = ("batch", "head", "query", "key")
NOTHING: Mapping[str, Any] = {}
NO_CONTEXT = nullcontext[Any]()


# ----------------------------------------------------------------------------- the inputs of a call

MaskKind = Literal["bool", "01", "whole", "additive", "lengths"]
MaskMeaning = Literal["keep", "hide"]


class MaskForm(NamedTuple):
    """The format of a mask argument.

    `axes` are words of `batch head query key`, in order; ("batch", "key") is a padding mask,
    ("batch",) lengths. `kind`: bool; 01, numbers in the module's dtype; whole, integers 0 and 1;
    additive, 0 and −∞ in the module's dtype; lengths, the number of tokens of each sequence.
    `true_means` is the meaning of True or 1, always keep for additive masks and lengths.
    `n_shared`: the batch axis of the mask is shorter by this factor and repeats, as the masks of
    windows repeat for each image. `is_padding`: it takes only which tokens are real; `hides`: texts
    that differ in a hidden key have the same outputs.
    """

    parameter: str
    axes: tuple[str, ...]
    kind: MaskKind
    true_means: MaskMeaning = "keep"
    n_shared: int = 1
    is_padding: bool = False
    hides: bool = False


_MASKS: tuple[tuple[AxisNames, bool], ...] = (
    (PATTERN_AXES, False),
    (("batch", "query", "key"), False),
    (("query", "key"), False),
    (("batch", "key"), True),
    (PATTERN_AXES, True),
    (("batch", "query", "key"), True),
)
"""The axes of a mask, and whether it is of padding, the likeliest first."""
_KINDS: tuple[tuple[MaskKind, MaskMeaning], ...] = (
    ("bool", "keep"),
    ("bool", "hide"),
    ("01", "keep"),
    ("01", "hide"),
    ("whole", "keep"),
    ("whole", "hide"),
    ("additive", "keep"),
)


def forms_of(parameter: CallParameter) -> list[MaskForm]:
    """The forms in which a mask, and then padding, may be given, the likeliest first."""
    name, role, default = parameter.name, parameter.role, parameter.default
    if role == "lengths":
        return [MaskForm(name, ("batch",), "lengths", is_padding=True)]
    return [
        MaskForm(name, axes, kind, meaning, is_padding=is_padding)
        for (axes, is_padding), (kind, meaning) in product(_MASKS, _KINDS)
        if (is_padding or role in ("mask", "bias"))
        and (kind == "additive" or role != "bias")
        and (not isinstance(default, Tensor) or default.ndim == len(axes))
    ]


class CallSizes(NamedTuple):
    """The sizes of a call, the position of its first token, and whether it is one of training.
    `n_heads` is 0 for inputs `[batch, length, width]`; for a function of q, k and v inputs are
    `[batch, head, length, width]`.
    """

    batch: int
    q_len: int
    k_len: int
    d_in: int = 1
    d_context: int = 1
    n_heads: int = 0
    start: int = 0
    training: bool = False


def at_sizes(value: Any, sizes: CallSizes) -> Any:
    """An argument of a call of these sizes: what a `partial` makes for them, or the value
    itself.
    """
    return value(sizes) if isinstance(value, partial) else value


def for_each_text(tensor: Tensor, n_texts: int, sizes: CallSizes) -> Tensor:
    """An argument of a call of these sizes, of which the first part serves for each text if it has
    one for each of `n_texts`.
    """
    has_parts = tensor.ndim > 0 and len(tensor) == n_texts and tensor.shape[1:2] != tensor.shape[:1]
    return tensor[:1].expand(sizes.batch, *tensor.shape[1:]) if has_parts else tensor


class InputDrawer:
    """Random inputs of an attention, the same in the same order for the same seed: standard normal
    numbers in float64 on the CPU, or token ids. Inputs with a context also have separate values if
    it takes them.
    """

    def __init__(self, attention: UserAttention, seed: int) -> None:
        self.attention, self.sizes = attention, attention.sizes
        self.generator = torch.Generator().manual_seed(seed)

    def rows(self, length: int, *, context: bool = False, batch: int | None = None) -> Tensor:
        """Token vectors of the query width, or of the context width, or token ids of width 1."""
        batch, ids = batch or self.sizes.batch, self.attention.ids
        if ids is not None:
            return ids[
                torch.randint(len(ids), (batch, length, 1), generator=self.generator).to(ids.device)
            ]
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
        queries = self.rows(q_len, batch=batch)
        if not with_context and not self.sizes.n_heads and self.sizes.d_in == self.sizes.d_context:
            return Inputs(queries)
        k_len = k_len or self.sizes.k_len if with_context else q_len
        keys = self.rows(k_len, context=True, batch=batch)
        has_values = self.sizes.n_heads > 0 or (with_context and self.attention.n_rows > 2)
        return Inputs(
            queries, keys, self.rows(k_len, context=True, batch=batch) if has_values else None
        )

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
        places, row = torch.arange(k_len), torch.arange(batch)[:, None]
        if not on_the_right:
            return ((places + row) % 3 != 1) | (places == k_len - 1)
        lengths = (k_len - 1 - row * max(1, k_len // 3)).clamp(min=1)
        lengths[1:][-1:] = k_len
        return places < lengths


# ----------------------------------------------------------------------------------------- the call


@dataclass(frozen=True)
class UserAttention:
    """A user's attention that can be called.

    `sizes` are valid input sizes; `k_len` equals `q_len` for attention over the queries only. It
    computes in `dtype` on `device`. `slots` are the parameters of queries, keys and values, and
    `axes` those of each input. `ids` are the ordinary token ids, None for vectors. `others` are its
    other arguments, of which a `partial` makes its value for the sizes of each call. With an
    `example`, a function of the callable and a length or of the callable alone, they are those of
    the call that it makes. `output` is the path and the axes of the output; where `is_inside`, it
    is what the output layer reads, after one more token with `has_target`, which it only compares
    with.

    `forms` are the accepted forms of masks and of padding, with both meanings of True, the
    likeliest first. `mode` is self or cross, None for an attention with one mode. `is_copied`: each
    call uses a new copy of the module, so that no state remains. `is_without_dropout`: what it
    drops by torch's functions is kept.
    """

    built: Built
    sizes: CallSizes
    dtype: torch.dtype
    device: torch.device
    slots: tuple[CallParameter, ...] = ()
    axes: AxisNames = ROW_AXES
    ids: Tensor | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    example: Callable[..., Any] | None = None
    output: tuple[str, AxisNames] = ("", ROW_AXES)
    is_inside: bool = False
    has_target: bool = False
    forms: tuple[MaskForm, ...] = ()
    mode: Mode | None = None
    is_copied: bool = False
    is_without_dropout: bool = False

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
    def n_rows(self) -> int:
        """The number of arguments for queries, keys and values."""
        return len({slot.part for slot in self.slots})

    @property
    def takes_context(self) -> bool:
        """Whether keys may be a separate sequence of another length."""
        return self.n_rows > 1 and self.sizes.q_len != self.sizes.k_len

    @property
    def causal_by(self) -> str | None:
        """The argument that makes it causal."""
        switches = signature_of(self.built.call, "causal")
        return next(
            (switch.name for switch in switches if self.others.get(switch.name) is True), None
        )

    @property
    def untried(self) -> tuple[str, ...]:
        """The arguments that always keep their defaults, though they may change the output."""
        passed = {slot.name for slot in self.slots} | {form.parameter for form in self.forms}
        passed |= {name for name, value in self.others.items() if value is not None}
        others = [
            p for p in self._effective if p.name not in passed or p.role == "offset"
        ]  # which is 0
        return tuple(p.name for p in others) if self.example is None else ()

    @property
    def unread(self) -> tuple[str, ...]:
        """The arguments that its source never reads."""
        return tuple(p.name for p in self._effective if p.name in never_read(self.built.call))

    @property
    def _effective(self) -> list[CallParameter]:
        """The parameters whose values may change the output."""
        return [p for p in signature_of(self.built.call) if p.role not in WITHOUT_EFFECT]

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
        is_masked = inputs.allowed is not None or inputs.real is not None
        masks = (
            {mask.parameter: mask_in(mask, inputs.allowed, inputs.real, sizes)}
            if mask and is_masked
            else {}
        )
        own = tree_map_only(Tensor, self._here, {**others, **self._rows(inputs), **masks})
        arguments = {**own, **given}
        call = copied(self.built.call) if self.is_copied else self.built.call
        inside: list[Tensor] = []

        def note(_name: str, part: nn.Module, _inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) and output else output
            if (
                part is self.built.module
                or not isinstance(output, Tensor)
                or output.is_nested
                or output.ndim != 3
            ):
                return
            lengths = [*output.shape]
            batch = lengths.pop(self.axes.index("batch"))
            if batch == sizes.batch and not {1, sizes.q_len} & {*lengths}:
                inside.clear()  # it goes on with other rows, such as a summary
            inside.extend([output] if _fits(output.shape, (*self.axes, "width"), sizes) else [])

        watched = self.built.module if self.is_inside else None
        # the other kernels of torch misread a mask in float32 beside float64
        kernel = sdpa_kernel(SDPBackend.MATH) if self.dtype == torch.float64 else NO_CONTEXT
        dropout = WithoutDropout() if self.is_without_dropout else NO_CONTEXT
        with (
            _quietly(self.built, call, training=training),
            watching(watched, note),
            kernel,
            dropout,
            within,
        ):
            result = self._of_arguments(call, arguments, sizes)
        if not self.is_inside:
            return result
        if not inside:
            raise Unreadable(f"no part of {self.built.name} gives an output of each token")
        return result, inside[-1]

    def _of_arguments(
        self, call: Callable[..., Any], arguments: dict[str, Any], sizes: CallSizes
    ) -> Any:
        """What the call returns for these arguments, as the example makes it if there is one. What
        an example draws is the same in every call.
        """
        if self.example is not None:
            state = torch.get_rng_state()

            def given(theirs: dict[str, Any]) -> dict[str, Any]:
                torch.set_rng_state(state)
                fitted = partial(for_each_text, n_texts=self.sizes.batch, sizes=sizes)
                with torch._C.DisableTorchFunction():  # these copies are no part of the user's code
                    return {
                        **tree_map_only(Tensor, lambda tensor: self._here(fitted(tensor)), theirs),
                        **arguments,
                    }

            torch.default_generator.manual_seed(0)
            lengths = (sizes.q_len,) if self.is_resizable else ()
            return call_user(self.example, Changed(call, given), *lengths)
        positional_only = [
            slot.name for slot in self.slots if slot.positional_only and slot.name in arguments
        ]
        return call_user(call, *[arguments.pop(name) for name in positional_only], **arguments)

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
        if path not in tensors or tensors[path].ndim != len(axes):
            found = output_in(result, [axes], sizes)
            if found is None:
                shapes = (
                    ", ".join(str(list(tensor.shape)) for tensor in tensors.values())
                    or type(result).__name__
                )
                message = (
                    f"texts [{sizes.batch}, {sizes.q_len}] give {shapes}, not an output"
                    f" [{', '.join(axes)}]"
                )
                raise Unreadable(message)
            path = found[0]
        return rearranged(tensors[path].detach(), axes, self.canonical).contiguous().clone()

    def sizes_of(self, inputs: Inputs) -> CallSizes:
        """The sizes of a call with these inputs."""
        batch, q_len, k_len = inputs.lengths
        n_heads = inputs.queries.shape[1] if self.is_function else 0
        return self.sizes._replace(batch=batch, q_len=q_len, k_len=k_len, n_heads=n_heads)

    def with_call(self, call: Callable[..., Any]) -> UserAttention:
        """The same for another copy of the callable."""
        return replace(self, built=replace(self.built, call=call), is_copied=False)

    def _rows(self, inputs: Inputs) -> dict[str, Tensor]:
        """The token vectors of a call, by parameter; without those that self-attention may omit."""
        rows = {}
        for slot in self.slots:
            if slot.required or slot.part == "q" or inputs.keys is not None:
                given = inputs.rows_of(slot.part)
                given = torch.cat([given, given[:, :1]], dim=1) if self.has_target else given
                rows[slot.name] = rearranged(given, self.canonical, self.axes)
        return rows

    def _here(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on this device, in this dtype."""
        return tensor.to(self.device, cast_dtype(tensor, self.dtype), copy=True).contiguous()

    # ----------------------------------------------------------------------------- the call as text

    @property
    def example_text(self) -> str:
        """The call as an `--example`."""
        first, rows = signature_of(self.built.call)[0].name, list[str]()
        for slot in self.slots:
            width = self.sizes.d_in if slot.part == "q" else self.sizes.d_context
            words = {"batch": 2, "head": self.sizes.n_heads, "width": width}
            shape = ", ".join(str(words.get(axis, "T")) for axis in self.axes)
            made = (
                f"torch.randn({shape})"
                if self.ids is None
                else f"torch.randint({len(self.ids)}, ({shape}))"
            )
            is_first = slot.name == first and not rows
            rows.append(made if slot.positional_only or is_first else f"{slot.name}={made}")
        return f"lambda m, T: m({self._arguments_text(rows)})"

    @property
    def described(self) -> str:
        """The call as one line of Python, with a comment on layouts."""
        call, (path, axes) = self.built.call, self.output
        usual, of_result = (
            (self.canonical, self.axes) if self.ids is None else (OF_IDS, (*self.axes, "width"))
        )
        rows = [slot.part if slot.name.startswith("args[") else slot.name for slot in self.slots]
        masks = [form.parameter for form in sorted(self.forms, key=lambda form: form.is_padding)]
        notes = [] if self.axes == usual else [f"rows [{_words(self.axes)}]"]
        notes += [] if self.is_resizable else [f"only at length {self.sizes.q_len}"]
        notes += [] if axes == of_result else [f"result [{_words(axes)}]"]
        notes += ["what its output layer reads"] if self.is_inside else []
        name = "forward" if isinstance(call, nn.Module) else getattr(call, "__name__", "__call__")
        comment = f"  # {'; '.join(notes)}" if notes else ""
        return (
            f"{name}({self._arguments_text(rows, masks)}){'' if self.is_inside else path}{comment}"
        )

    def _arguments_text(self, rows: Sequence[str], masks: Sequence[str] = ()) -> str:
        """The arguments of a call behind those for token vectors: tensors of one number, or a
        triangle of it, for two texts of length T, and `…` for what takes more than a word.
        """
        words, texts = (
            {self.sizes.batch: "2", self.sizes.q_len: "T", self.sizes.k_len: "T"},
            dict[str, str](),
        )
        for name in [
            parameter.name
            for parameter in signature_of(self.built.call)
            if parameter.name in self.others
        ]:
            value = at_sizes(self.others[name], self.sizes)
            is_plane = isinstance(value, Tensor) and value.ndim > 1
            texts[name] = (
                _text_of(value, words)
                if is_plane
                else "…"
                if "tensor(" in repr(value)
                else repr(value)
            )
        texts |= dict.fromkeys(masks, "…")
        return ", ".join([*rows, *(f"{name}={text}" for name, text in texts.items())])


def _text_of(tensor: Tensor, words: Mapping[int, str]) -> str:
    """A tensor of one number, or a triangle of it, such as a mask, as code with words for its
    sizes; `…` for any other.
    """
    number = max(tensor.flatten().tolist(), key=abs)
    full, shape = (
        torch.full_like(tensor, number),
        [words.get(size, str(size)) for size in tensor.shape],
    )
    text = (
        f"torch.full(({', '.join(shape)}),"
        f" {words.get(number, str(number).replace('inf', 'torch.inf'))})"
    )
    made = {text: full, f"{text}.tril()": full.tril(), f"{text}.triu(1)": full.triu(1)}
    return next((text for text, each in made.items() if torch.equal(each, tensor)), "…")


def mask_in(
    form: MaskForm, allowed: Tensor | None, real: Tensor | None, sizes: CallSizes
) -> Tensor:
    """The mask in the given form, from `allowed`, bool `[batch or 1, 1, query, key]`, `real`, bool
    `[batch, key]`, or both; True = keep.

    The batch axis has full size; other axes have size 1 if the mask is constant along them, as it
    is along those that the form lacks. Lengths are of padding on the right.
    """
    if form.kind == "lengths":
        return torch.full((sizes.batch,), sizes.k_len) if real is None else real.sum(-1)
    keep = torch.ones((), dtype=torch.bool) if allowed is None else allowed
    if real is not None:
        keep = keep.to(real.device) & real[:, None, None, :]
    for dim, axis in enumerate(PATTERN_AXES):
        if axis not in form.axes and keep.shape[dim] > 1:
            keep = keep.narrow(dim, 0, 1)
    if "batch" in form.axes:
        keep = keep.expand(sizes.batch, -1, -1, -1)[: sizes.batch // form.n_shared]
    keep = rearranged(keep, PATTERN_AXES, form.axes)
    if form.kind == "additive":
        return torch.zeros(keep.shape, dtype=torch.float64, device=keep.device).masked_fill(
            ~keep, -torch.inf
        )
    marked = keep if form.true_means == "keep" else ~keep
    return marked.to({"01": torch.float64, "whole": torch.int64}.get(form.kind, torch.bool))


def mask_of(form: MaskForm, sizes: CallSizes, *, causal: bool) -> Tensor:
    """The mask of a call that hides later queries from each other, or nothing."""
    allowed = torch.ones(
        1, 1, sizes.q_len, sizes.q_len if causal else sizes.k_len, dtype=torch.bool
    )
    return mask_in(form, allowed.tril() if causal else allowed, None, sizes)


@contextmanager
def _quietly(built: Built, call: Callable[..., Any], *, training: bool) -> Iterator[None]:
    """A call that is reported as a stage: without gradients and warnings, and with a module in
    `train` or `eval` mode. Norms over the batch always are as in evaluation, for they would keep
    what they saw.
    """
    built.stage(f"calling {built.name}")
    modes = {part: part.training for part in call.modules()} if isinstance(call, nn.Module) else {}
    buffers = [
        (part, *item, item[1].clone())
        for part in modes
        for item in part.named_buffers(recurse=False)
        if training
    ]
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        try:
            for part in modes:
                part.training = training and not isinstance(part, nn.modules.batchnorm._BatchNorm)
            yield
        finally:
            built.stage(f"examining {built.name}", limited=False)
            for part, mode in modes.items():
                part.training = mode
            for part, name, buffer, values in buffers:  # which training may change
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
        named = [
            parameter.name
            for parameter in signature_of(self.call)
            if parameter.role not in ("rest", "any")
        ]
        names = [*named, *(f"args[{number}]" for number in range(len(named), len(positional)))][
            : len(positional)
        ]
        arguments = self.change({**dict(zip(names, positional, strict=True)), **keywords})
        return on_behalf(self.call, *[arguments.pop(name) for name in names], **arguments)

    @ours()
    def __getattr__(self, name: str) -> Any:
        """An attribute of the callable, such as a config."""
        return on_behalf(getattr, self.call, name)


# --------------------------------------------------------------------------- the output in a result


def leaves(result: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists and dicts, or in the fields of an object, in order, with its
    path as in Python, such as `[0]`, `["z"]` or `.z`; only those with rows of numbers, unlike
    torch's nested and sparse tensors and those without data.
    """
    is_object = hasattr(result, "__dict__") and not isinstance(
        result, Tensor | tuple | list | Mapping
    )
    parts = (
        [(f".{name}", part) for name, part in vars(result).items()] if is_object else [("", result)]
    )
    for start, part in parts:
        for path, leaf in tree_leaves_with_path(part):
            is_plain = isinstance(leaf, Tensor) and not (leaf.is_nested or leaf.is_meta)
            if is_plain and leaf.layout == torch.strided:
                yield start + keystr(path), leaf


def output_in(
    result: Any, orders: Sequence[AxisNames], sizes: CallSizes
) -> tuple[str, AxisNames] | None:
    """The path and the axes of the output: the first tensor of floats with one of the orders of
    axes. Tensors not as wide as a pattern are preferred, then earlier orders.
    """
    found = []
    for (number, axes), (path, tensor) in product(enumerate(orders), leaves(result)):
        if tensor.is_floating_point() and _fits(tensor.shape, axes, sizes):
            found.append(((tensor.shape[-1] == sizes.k_len, number), path, axes))
    best = min(found, key=lambda each: each[0], default=None)
    return best and best[1:]


def _fits(shape: Sequence[int], axes: AxisNames, sizes: CallSizes) -> bool:
    """Whether a tensor of this shape may have these axes. A width may have any size but 0."""
    height, width = _grid(sizes.q_len) if "column" in axes else (sizes.q_len, 1)
    expected = {"batch": sizes.batch, "head": sizes.n_heads, "row": height, "column": width}
    if len(shape) != len(axes) or 0 in shape:
        return False
    return all(expected.get(axis, size) == size for size, axis in zip(shape, axes, strict=True))


def _grid(length: int) -> tuple[int, int]:
    """The height and the width of a map of so many cells, as square as possible."""
    height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return height, length // height


def rearranged(tensor: Tensor, have: AxisNames, want: AxisNames) -> Tensor:
    """The tensor with its axes in another order. Extra axes are squeezed, missing ones are added
    with size 1; the rows lie on a map where a `column` is required. Raises `Unreadable` for a
    tensor of other axes, and for an extra axis of another size.
    """
    if tensor.ndim != len(have):
        raise Unreadable(f"{list(tensor.shape)} has not the axes {', '.join(have)}")
    if "column" in want and "column" not in have:
        dim = have.index("row")
        tensor = tensor.unflatten(dim, _grid(tensor.shape[dim]))
        have = (*have[: dim + 1], "column", *have[dim + 1 :])
    if "column" in have and "column" not in want:
        dim = have.index("row")
        tensor = tensor.flatten(dim, dim + 1)
        have = (*have[: dim + 1], *have[dim + 2 :])
    if any(tensor.shape[dim] != 1 for dim, axis in enumerate(have) if axis not in want):
        message = f"{', '.join(have)} cannot be {', '.join(want)}, got {list(tensor.shape)}"
        raise Unreadable(message)
    names = [*have, *(axis for axis in want if axis not in have)]
    tensor = tensor[(..., *[None] * (len(names) - len(have)))]
    order = [names.index(axis) for axis in (*want, *(axis for axis in have if axis not in want))]
    return tensor.permute(order).flatten(len(want) - 1)


def _words(axes: AxisNames) -> str:
    of_map = (
        {"width": "d", "row": "height", "column": "width"}
        if "column" in axes
        else {"row": "seq", "width": "d"}
    )
    return ", ".join(of_map.get(axis, axis) for axis in axes)
