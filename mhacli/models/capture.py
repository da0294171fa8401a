"""Captures the attention of a checkpoint while the model runs its usual code path.

The functions in use are wrapped, not replaced under a new name: transformers' registry has no mask function for a new name, so
padding and causality would be silently lost. Wrapping is process-wide and is undone on any exit.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhacli.errors import MhaError
from mhacli.models.calls import Call, InterceptionLevel, ScoredCall, SoftmaxCall, seen_fields
from mhacli.models.inputs import called
from mhacli.models.kernels import KernelWatch
from mhacli.models.layer_names import LayerNumbers, is_numbered

Take = Callable[[Call], Tensor | None]
"""Receives each call. Its tensors belong to the model, so copy or reduce them before returning. A returned tensor replaces `z`
in the model; None changes nothing."""

_ONE_AT_A_TIME = threading.RLock()
_ATTENTION = re.compile(r"att(?:n|en)", re.IGNORECASE)


@contextmanager
def captured(model: nn.Module, take: Take, *, batch: int) -> Iterator[None]:
    """A context in which `take` receives every attention of `model` as it is computed.

    `batch` is the number of sequences, needed where code merges the axes of batch and heads. Other models are not affected; a
    second capture waits for the first. If `take` returns None, nothing that the model computes is changed.
    """
    with watched(model, Watch(model, take, batch)):
        yield


@contextmanager
def watched(model: nn.Module, watch: Watch) -> Iterator[None]:
    """A context like `captured` for a `watch` whose batch may change between passes. Functions are unwrapped in reverse order,
    also if a watch that was opened earlier is closed first; it then captures nothing more."""
    writes_out = _writes_out(model)
    with _ONE_AT_A_TIME, _hooked(model, watch, every_module=writes_out), ExitStack() as stack:
        for wrap in (_wrapped_registry, _wrapped_files):
            stack.enter_context(wrap(model, watch))
        if writes_out:
            stack.enter_context(_FunctionWatch(watch))
        _OPEN.append((watch, stack.pop_all()))
        try:
            yield
        finally:
            watch.is_closed = True
            while _OPEN and _OPEN[-1][0].is_closed:
                _OPEN.pop()[1].close()


_OPEN: list[tuple[Watch, ExitStack]] = []
"""The open watches with the functions that they wrap, the innermost first."""


class Watch:
    """The state of a capture while a model runs: the running modules, and the receiver of calls."""

    def __init__(self, model: nn.Module, take: Take, batch: int) -> None:
        self.names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self.batch, self.may_lack_batch = batch, False
        self.is_inside = self.is_closed = False
        self.pending: _Pending | None = None
        self.open: list[nn.Module] = []
        self.blocks: list[nn.Module] = []
        self.running: list[tuple[nn.Module, int]] = []
        self.n_runs = self.n_entered = self.n_captured = self.n_captured_before = 0
        self.silent: dict[str, str] = {}
        self._take, self._is_pair = take, is_pair(model)
        self.begin_pass()

    def begin_pass(self) -> None:
        """Starts a forward pass: layers are counted from 0."""
        self._numbers, self.pending = LayerNumbers(is_pair=self._is_pair), None

    def where(self) -> tuple[str | None, int]:
        """The outermost running module of a list, if any, and the number of this run."""
        if self.blocks:
            return self.names[id(self.blocks[0])], self.n_runs
        return None, self.n_runs if self.open or not self.running else -self.running[-1][1]

    @property
    def is_blind(self) -> bool:
        """Whether the current computation is not to be captured."""
        return self.is_inside or self.is_closed

    @property
    def caller(self) -> nn.Module | None:
        """The module whose code runs: the innermost one named like an attention, otherwise the innermost."""
        if self.is_blind:
            return None
        return self.open[-1] if self.open else self.running[-1][0] if self.running else None

    def by_head(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors of an attention with axes for sequences and heads, which code may merge or leave out. The first tensor
        has a row for each query."""
        first = tensors[0]
        n = first.shape[:-3].numel()
        if first.ndim == 3:
            is_one = self.may_lack_batch and first.shape[1] == self.batch
            n = 1 if is_one or first.shape[0] % self.batch else self.batch
        return [_by_head(tensor, n) for tensor in tensors]

    def notify(
        self, kind: type[Call], module: nn.Module, level: InterceptionLevel, where: tuple[str | None, int], **seen: Any
    ) -> Tensor | None:
        """Passes a complete call, made `where`, to the receiver. Returns the replacement of its `z`, if any."""
        self.n_captured += 1
        name, (block, run) = self.names[id(module)], where
        layer, of, part = self._numbers.next(name, block or name, run)
        is_token_first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
        place: dict[str, Any] = {
            "name": name,
            "layer": layer,
            "kind": of,
            "part": part,
            "is_token_first": is_token_first,
        }
        call = kind(**place, level=level, implementation=_implementation_of(module) or "eager", **seen)
        self.is_inside = True  # computations on a call are not the model's
        try:
            return self._take(call)
        finally:
            self.is_inside = False

    def notify_pending(self) -> Tensor | None:
        """Passes on a pattern that still waits for its product with the values, if there is one."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None

        names = [name for name in ("scores", "pattern", "v", "z") if getattr(pending, name) is not None]
        return self.notify(
            SoftmaxCall,
            pending.module,
            "softmax",
            pending.where,
            **dict(zip(names, self.by_head(*(getattr(pending, name) for name in names)), strict=True)),
            unknown=("dropout",) if pending.is_dropped else (),
        )

    def note_silence(self, module: nn.Module) -> None:
        """Notes a module with parts that is named like an attention and ran without a captured call."""
        if self.n_captured == self.n_captured_before and any(module.children()):
            self.silent[self.names[id(module)]] = type(module).__name__

    def watched(self, level: InterceptionLevel, original: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapped function, which captures every call by a module of the model."""
        signature = inspect.signature(original)

        @functools.wraps(original)  # other wrappers read its signature
        def watching(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.is_blind or id(module) not in self.names:
                return original(module, *args, **kwargs)
            self.is_inside, kernel = True, KernelWatch()
            try:
                with nullcontext() if _implementation_of(module) == _COMPILED else kernel:
                    result = called(original, module, *args, **kwargs)
            finally:
                self.is_inside = False
            given = _flat(signature.bind(module, *args, **kwargs), signature)
            seen = seen_fields(module, given, result[0].transpose(1, 2), kernel, level)
            changed = self.notify(ScoredCall, module, level, self.where(), **seen)
            return result if changed is None else (changed.transpose(1, 2).contiguous(), *result[1:])

        return watching


_COMPILED = "flex_attention"
"""The implementation that calls torch.compile, which computes differently while operators are watched."""


def _implementation_of(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _by_head(tensor: Tensor, n: int) -> Tensor:
    """A tensor of `n` sequences with a separate axis for them, also if all of them share it."""
    if tensor.ndim == 4 and tensor.shape[0] == n:
        return tensor
    rows = tensor.reshape(-1, *tensor.shape[-2:])
    is_shared = (tensor.ndim > 3 and tensor.shape[:-3].numel() == 1) or len(rows) % n
    return rows.expand(n, -1, -1, -1) if is_shared else rows.reshape(n, -1, *rows.shape[-2:])


def _flat(bound: inspect.BoundArguments, signature: inspect.Signature) -> dict[str, Any]:
    """All arguments by name, including those in `**kwargs`."""
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


# ------------------------------------------------------------------------------------------------ what is wrapped, and put back


def is_pair(model: nn.Module) -> bool:
    """Whether a model has an encoder, and a decoder that reads its output."""
    says_so = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return says_so or any(isinstance(module, nn.Transformer) for module in model.modules())


class Hook:
    """A hook on a module's runs. In copies of the module, and in saved ones, the hook does nothing."""

    def __init__(self, hears: Callable[..., None] | None = None) -> None:
        self._hears = hears

    def __call__(self, *seen: Any) -> None:
        """Calls the callback with the arguments from torch."""
        if self._hears is not None:
            self._hears(*seen)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        """A hook without callback, for copies."""
        return Hook, ()


@contextmanager
def _hooked(model: nn.Module, watch: Watch, *, every_module: bool) -> Iterator[None]:
    """A context that tracks the beginning of passes and the running attention modules and modules of lists, innermost last; with
    `every_module`, all running modules."""

    def followed(running: list[nn.Module], followed_module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, *_: Any) -> None:
            if not watch.blocks:  # a module that starts outside any block is a layer or contains all layers
                watch.n_runs += 1
            if running is watch.open and not running:
                watch.n_captured_before = watch.n_captured
            running.append(module)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if running and running[-1] is module:  # otherwise an earlier hook raised, and `enter` was not called
                running.pop()
            if not watch.open:  # its product of pattern and values cannot follow any more
                watch.notify_pending()
                if running is watch.open and output is not None:
                    watch.note_silence(module)

        yield followed_module.register_forward_pre_hook(Hook(enter))
        yield followed_module.register_forward_hook(Hook(leave), always_call=True)

    def begin(module: nn.Module, *_: Any) -> None:
        watch.n_entered += 1
        watch.running.append((module, watch.n_entered))

    def end(module: nn.Module, *_: Any) -> None:
        if watch.running and watch.running[-1][0] is module:
            watch.running.pop()

    def begin_model(*_: Any) -> None:
        watch.begin_pass()
        for running in (watch.open, watch.blocks, watch.running):
            running.clear()  # left by an interrupted pass, which calls no hook

    handles = [model.register_forward_pre_hook(Hook(begin_model))]
    for name, module in model.named_modules():
        handles += followed(watch.open, module) if is_attention(name, module) else ()
        handles += followed(watch.blocks, module) if is_numbered(name) else ()
        if every_module:
            handles.append(module.register_forward_pre_hook(Hook(begin)))
            handles.append(module.register_forward_hook(Hook(end), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is or contains an attention, judged by its name."""
    return bool(_ATTENTION.search(type(module).__name__) or _ATTENTION.search(name.rpartition(".")[2]))


@contextmanager
def _wrapped_registry(model: nn.Module, watch: Watch) -> Iterator[None]:
    """A context in which the functions of the registry that the model uses are wrapped: the common ones and those of its
    files."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import AttentionInterface

    wanted = {_implementation_of(module) for module in model.modules()}
    registries: list[dict[str, Any]] = [AttentionInterface._global_mapping]
    for file in _files(model):
        own = getattr(getattr(file, "ALL_ATTENTION_FUNCTIONS", None), "_local_mapping", None)
        registries += [own] if isinstance(own, dict) else []
    changed = [(registry, name, registry[name]) for registry in registries for name in wanted if name in registry]
    try:
        for registry, name, original in changed:
            registry[name] = watch.watched("registry", original)
        yield
    finally:
        for registry, name, original in changed:
            registry[name] = original


@contextmanager
def _wrapped_files(model: nn.Module, watch: Watch) -> Iterator[None]:
    """A context in which `eager_attention_forward` of the modelling files is wrapped."""
    changed = [
        (file, file.eager_attention_forward) for file in _files(model) if hasattr(file, "eager_attention_forward")
    ]
    try:
        for file, original in changed:
            file.eager_attention_forward = watch.watched("module", original)
        yield
    finally:
        for file, original in changed:
            file.eager_attention_forward = original


def _files(model: nn.Module) -> list[Any]:
    """The Python modules that define the classes of the model's parts."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


_LIBRARIES = ("torch.", "transformers.pytorch_utils")
"""The modules that define the layers inside an attention."""


def _writes_out(model: nn.Module) -> bool:
    """Whether an attention of the model may not use the registry, and must be captured at torch's functions."""
    parts = (
        module
        for name, module in model.named_modules()
        if is_attention(name, module) or not type(module).__module__.startswith(("torch.", "transformers."))
    )
    files = {type(module).__module__ for module in parts if not type(module).__module__.startswith(_LIBRARIES)}
    is_of_torch = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    return is_of_torch or any(not hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)


# --------------------------------------------------------------------------------------------------- torch's own functions


_SDPA = nn.functional.scaled_dot_product_attention
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SOFTMAX = {torch.softmax, Tensor.softmax, nn.functional.softmax}
_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_SAME_SHARES = {
    Tensor.to, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.view, Tensor.reshape, torch.reshape,
    Tensor.contiguous, Tensor.type_as, nn.functional.dropout, torch.dropout,
}  # fmt: skip
"""Functions that keep the weights of a pattern: changes of dtype or shape, and dropout, which does nothing in evaluation."""


_DROPPING = {nn.functional.dropout, torch.dropout}


def _drops(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `nn.functional.dropout` or `torch.dropout` sets anything to 0."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    return bool(given.get("p", 0.5)) and bool(given.get("training", given.get("train", True)))


_MULTI_HEAD = nn.functional.multi_head_attention_forward
_SEEN_MULTI_HEAD = FunctionType(
    _MULTI_HEAD.__code__,
    {**_MULTI_HEAD.__globals__, "has_torch_function": lambda _: False},
    argdefs=_MULTI_HEAD.__defaults__,
)
"""Functions without their dispatch to modes, so that the mode receives the functions that they call."""


class _FunctionWatch(TorchFunctionMode):
    """Captures `scaled_dot_product_attention` and softmax called by a modelling file itself."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs the function, and captures it if it is part of an attention."""
        kwargs = kwargs or {}
        caller = self._watch.caller
        if caller is None:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():  # this is traced, which allows a message of fixed words alone
            if func is _SDPA or (self._watch.open and func in _SOFTMAX):
                raise MhaError("a function made by torch.compile hides the attention within it", code="hidden")
            return func(*args, **kwargs)
        if func is _SDPA:
            return self._sdpa(caller, args, kwargs)
        if not self._watch.open:
            return func(*args, **kwargs)
        if func is _MULTI_HEAD:
            return self._multi_head(args, kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and isinstance(result, Tensor):
            self._softmax(args, kwargs, result)
        elif self._watch.pending is not None and args and isinstance(result, Tensor):
            return self._follow(self._watch.pending, func, args, kwargs, result)
        return result

    def _sdpa(self, caller: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        kernel = KernelWatch()
        with kernel:
            z = called(_SDPA, *args, **kwargs)
        given = dict(zip(_SDPA_NAMES, args, strict=False)) | dict(kwargs)
        q, k, v, z_by_head = self._watch.by_head(given["query"], given["key"], given["value"], z)
        scale = given.get("scale")
        changed = self._watch.notify(
            ScoredCall,
            caller,
            "sdpa",
            self._watch.where(),
            q=q,
            k=k,
            v=v,
            z=z_by_head,
            scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
            mask=given.get("attn_mask"),
            causal=bool(given.get("is_causal")),
            lse=kernel.lse_of(q),
            kernel=kernel.kernel or "math",
            unknown=("dropout_p",) if given.get("dropout_p") else (),
        )
        return z if changed is None else changed.reshape(z.shape)

    def _multi_head(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Runs the function behind nn.MultiheadAttention, whose operators a mode does not see. The batch is its second axis."""
        query = args[0] if args else kwargs["query"]
        watch = self._watch
        before = watch.batch, watch.may_lack_batch
        watch.batch, watch.may_lack_batch = query.shape[1] if query.ndim == 3 else 1, False
        try:
            with self:
                return called(_SEEN_MULTI_HEAD, *args, **kwargs)
        finally:
            watch.batch, watch.may_lack_batch = before

    def _softmax(self, args: Any, kwargs: Mapping[str, Any], pattern: Tensor) -> None:
        """Stores a softmax over the keys until its product with the values."""
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if scores.ndim in (3, 4) and dim in (-1, scores.ndim - 1):
            self._watch.notify_pending()
            self._watch.pending = _Pending(self._watch.open[-1], self._watch.where(), scores, pattern)

    def _follow(self, pending: _Pending, func: Any, args: Any, kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
        if func is torch.einsum:
            return self._follow_einsum(pending, args, result)
        if not pending.is_held(args[0]):
            return result
        if func in _PRODUCTS:
            pending.v, pending.z = args[1], result
            changed = self._watch.notify_pending()
            return result if changed is None else changed.reshape(result.shape)
        if func in _SAME_SHARES and result.numel() == pending.pattern.numel():
            pending.hold(result)
            pending.is_dropped |= func in _DROPPING and _drops(args, kwargs)
        return result

    def _follow_einsum(self, pending: _Pending, args: Any, result: Tensor) -> Tensor:
        """Captures the product with the values if it is an einsum of two tensors."""
        equation, *tensors = args
        at = next((i for i, tensor in enumerate(tensors) if pending.is_held(tensor)), None)
        orders = None if at is None or len(tensors) != 2 else _product_axes(equation, at, [t.ndim for t in tensors])
        if at is None or orders is None:
            return result
        of_values, of_output = orders
        pending.v, pending.z = tensors[1 - at].permute(of_values), result.permute(of_output)
        shape = pending.z.shape
        changed = self._watch.notify_pending()
        if changed is None:
            return result
        return changed.reshape(shape).permute([of_output.index(axis) for axis in range(len(of_output))])


def _product_axes(equation: str, at: int, n_axes: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The axes of values and output in the order batch, head, position, width, if an einsum of two tensors is the product of a
    pattern, tensor number `at`, with values. `n_axes` are the numbers of axes of both tensors.

    >>> _product_axes("bhqk,bkhd->bqhd", 0, [4, 4])
    ([0, 2, 1, 3], [0, 2, 1, 3])
    >>> _product_axes("...qk,...kd->...qd", 0, [3, 3])
    ([0, 1, 2], [0, 1, 2])
    """
    named = equation.replace(" ", "")
    n_more = n_axes[at] - len(named.partition("->")[0].split(",")[at].replace("...", ""))
    terms, _, output = named.replace("...", "αβγδ"[:n_more]).partition("->")
    both = terms.split(",")
    pattern, values = both[at], both[1 - at]
    if [len(term) for term in both] != [*n_axes] or len(pattern) < 3:
        return None
    outer, query, key = pattern[:-2], pattern[-2], pattern[-1]
    width = "".join(set(values) - set(pattern))
    wanted, made = [*outer, key, width], [*outer, query, width]
    if sorted(values) != sorted(wanted) or sorted(output) != sorted(made):
        return None
    return [values.index(axis) for axis in wanted], [output.index(axis) for axis in made]


class _Pending:
    """A pattern that waits for its product with the values; `storages` are those of the tensors with its weights."""

    def __init__(self, module: nn.Module, where: tuple[str | None, int], scores: Tensor, pattern: Tensor) -> None:
        self.module, self.where, self.scores, self.pattern = module, where, scores, pattern
        self.v: Tensor | None = None
        self.z: Tensor | None = None
        self.is_dropped = False
        self._held: list[Tensor] = []
        self.storages: set[int] = set()
        self.hold(pattern)

    def is_held(self, value: Any) -> bool:
        """Whether a value is a tensor with the same weights."""
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self.storages

    def hold(self, tensor: Tensor) -> None:
        """Adds a tensor with the same weights. It is kept alive, so that its memory is not reused."""
        self._held.append(tensor)
        self.storages.add(tensor.untyped_storage().data_ptr())
