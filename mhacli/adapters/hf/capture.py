"""Seeing what the attention of a checkpoint computes, while it runs the path that it always runs.

The functions in use are wrapped, never replaced by others: a new name in transformers' registry would have no mask
function, and padding and causality would be lost without a word. What is wrapped is process-wide, and is put back on any exit.
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

from mhacli.adapters.hf.calls import Call, InterceptionLevel, ScoredCall, SoftmaxCall, seen_fields
from mhacli.adapters.hf.inputs import called
from mhacli.adapters.hf.kernels import KernelWatch
from mhacli.adapters.hf.layer_names import LayerNumbers, is_numbered
from mhacli.errors import MhaError

Take = Callable[[Call], Tensor | None]
"""Who is told of a call. Its tensors belong to the model: what is to be kept is copied or reduced before the return. What is
returned takes the place of `z` in the model; with None nothing changes."""

_ONE_AT_A_TIME = threading.RLock()
_ATTENTION = re.compile(r"att(?:n|en)", re.IGNORECASE)


@contextmanager
def captured(model: nn.Module, take: Take, *, batch: int) -> Iterator[None]:
    """While it is open, every attention of `model` is told to `take`, as it comes.

    `batch` sequences tell the axes apart where code lays batch and heads into one. Other models of the process are left
    alone; a second capture waits for the first. Where `take` returns None, nothing that the model computes is changed.
    """
    with watched(model, Watch(model, take, batch)):
        yield


@contextmanager
def watched(model: nn.Module, watch: Watch) -> Iterator[None]:
    """The same for a `watch` whose batch may change from pass to pass. What is wrapped is put back in the reverse order, also
    where one that was opened before another is closed before it: until then it sees nothing more."""
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
"""What each watch has wrapped, the first one innermost."""


class Watch:
    """What is known while a model runs: whose attention is being computed, and who wants to hear of it."""

    def __init__(self, model: nn.Module, take: Take, batch: int) -> None:
        self.names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self.batch, self.may_lack_batch = batch, False
        self.is_inside = self.is_closed = False
        self.pending: _Pending | None = None
        self.open: list[nn.Module] = []
        self.blocks: list[nn.Module] = []
        self.running: list[tuple[nn.Module, int]] = []
        self.n_runs = self.n_entered = self.n_told = self.n_told_before = 0
        self.silent: dict[str, str] = {}
        self._take, self._is_pair = take, is_pair(model)
        self.begin_pass()

    def begin_pass(self) -> None:
        """A new forward pass counts its layers anew."""
        self._numbers, self.pending = LayerNumbers(is_pair=self._is_pair), None

    def where(self) -> tuple[str | None, int]:
        """The outermost module of a list that is being run, if any, and which run that is."""
        if self.blocks:
            return self.names[id(self.blocks[0])], self.n_runs
        return None, self.n_runs if self.open or not self.running else -self.running[-1][1]

    @property
    def is_blind(self) -> bool:
        """Whether what is computed is no attention of the model that anybody asks for."""
        return self.is_inside or self.is_closed

    @property
    def caller(self) -> nn.Module | None:
        """The module whose code runs: the innermost that is an attention by its name, else the innermost."""
        if self.is_blind:
            return None
        return self.open[-1] if self.open else self.running[-1][0] if self.running else None

    def by_head(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of an attention with an axis of sequences and one of heads, which code may lay into one or leave out. The first
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
        """A call that is complete, and was made `where`. Returns what takes the place of its `z`, if anything."""
        self.n_told += 1
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
        self.is_inside = True  # what is computed of a call is no attention of the model
        try:
            return self._take(call)
        finally:
            self.is_inside = False

    def tell_pending(self) -> Tensor | None:
        """Tells of a pattern that waits for its product with the values, if there is one."""
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
        """Notes a module that has run, is an attention by its name and has parts, where nothing was told of it."""
        if self.n_told == self.n_told_before and any(module.children()):
            self.silent[self.names[id(module)]] = type(module).__name__

    def watched(self, level: InterceptionLevel, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with every call of it by a module of the model told."""
        signature = inspect.signature(original)

        @functools.wraps(original)  # whoever wraps this in turn asks for its signature
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
"""The implementation that calls torch.compile, which computes otherwise while operators are watched."""


def _implementation_of(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _by_head(tensor: Tensor, n: int) -> Tensor:
    """A tensor of `n` sequences with an axis of its own for them. One that all of them share has it too."""
    if tensor.ndim == 4 and tensor.shape[0] == n:
        return tensor
    rows = tensor.reshape(-1, *tensor.shape[-2:])
    is_shared = (tensor.ndim > 3 and tensor.shape[:-3].numel() == 1) or len(rows) % n
    return rows.expand(n, -1, -1, -1) if is_shared else rows.reshape(n, -1, *rows.shape[-2:])


def _flat(bound: inspect.BoundArguments, signature: inspect.Signature) -> dict[str, Any]:
    """All arguments by name, those behind ** among them."""
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


# ------------------------------------------------------------------------------------------------ what is wrapped, and put back


def is_pair(model: nn.Module) -> bool:
    """Whether a model has an encoder, and a decoder that reads what it makes."""
    says_so = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return says_so or any(isinstance(module, nn.Transformer) for module in model.modules())


class Hook:
    """What hears of a module's runs. Copies of the module that are made or saved meanwhile have hooks that hear nothing."""

    def __init__(self, hears: Callable[..., None] | None = None) -> None:
        self._hears = hears

    def __call__(self, *seen: Any) -> None:
        """Hands on what torch tells of a run."""
        if self._hears is not None:
            self._hears(*seen)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        """The hook of a copy."""
        return Hook, ()


@contextmanager
def _hooked(model: nn.Module, watch: Watch, *, every_module: bool) -> Iterator[None]:
    """Hears of the beginning of a pass, and which attention modules and which of lists are being run, innermost last; with
    `every_module` which of all."""

    def followed(running: list[nn.Module], followed_module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, *_: Any) -> None:
            if not watch.blocks:  # what begins outside of any block is a layer, or holds all
                watch.n_runs += 1
            if running is watch.open and not running:
                watch.n_told_before = watch.n_told
            running.append(module)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if running and running[-1] is module:  # else a hook before ours raised, and it was never entered
                running.pop()
            if not watch.open:  # no product of its pattern and values can follow
                watch.tell_pending()
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
            running.clear()  # of a pass that was interrupted, which calls no hook

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
    """Whether a module is an attention, or holds one, by what it is called."""
    return bool(_ATTENTION.search(type(module).__name__) or _ATTENTION.search(name.rpartition(".")[2]))


@contextmanager
def _wrapped_registry(model: nn.Module, watch: Watch) -> Iterator[None]:
    """The functions of the registry that the model's modules ask for, watched: those of all models, and of its own files."""
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
    """`eager_attention_forward` of the modelling files, watched."""
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
    """The Python modules that the classes of the model's parts come from."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


_LIBRARIES = ("torch.", "transformers.pytorch_utils")
"""Where the layers come from that an attention is made of."""


def _writes_out(model: nn.Module) -> bool:
    """Whether some attention of the model may go past the registry, and has to be seen by torch's own functions."""
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
"""What leaves the shares of a pattern as they are: another dtype or shape, and dropout, which does nothing in evaluation."""


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
"""The same code, which does not hand itself over to a mode, so that the mode is handed what it calls."""


class _FunctionWatch(TorchFunctionMode):
    """Sees `scaled_dot_product_attention` and softmax where a modelling file calls them itself."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs the function, and looks at it if it is part of an attention."""
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
        """What nn.MultiheadAttention calls, whose operators a mode does not see. The batch is its second axis."""
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
        """A softmax over the last axis of something with a query and a key axis waits for its product."""
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if scores.ndim in (3, 4) and dim in (-1, scores.ndim - 1):
            self._watch.tell_pending()
            self._watch.pending = _Pending(self._watch.open[-1], self._watch.where(), scores, pattern)

    def _follow(self, pending: _Pending, func: Any, args: Any, kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
        if func is torch.einsum:
            return self._follow_einsum(pending, args, result)
        if not pending.is_held(args[0]):
            return result
        if func in _PRODUCTS:
            pending.v, pending.z = args[1], result
            changed = self._watch.tell_pending()
            return result if changed is None else changed.reshape(result.shape)
        if func in _SAME_SHARES and result.numel() == pending.pattern.numel():
            pending.hold(result)
            pending.is_dropped |= func in _DROPPING and _drops(args, kwargs)
        return result

    def _follow_einsum(self, pending: _Pending, args: Any, result: Tensor) -> Tensor:
        """The product with the values, where it is written as an einsum of two tensors."""
        equation, *tensors = args
        at = next((i for i, tensor in enumerate(tensors) if pending.is_held(tensor)), None)
        orders = None if at is None or len(tensors) != 2 else _product_axes(equation, at, [t.ndim for t in tensors])
        if at is None or orders is None:
            return result
        of_values, of_output = orders
        pending.v, pending.z = tensors[1 - at].permute(of_values), result.permute(of_output)
        shape = pending.z.shape
        changed = self._watch.tell_pending()
        if changed is None:
            return result
        return changed.reshape(shape).permute([of_output.index(axis) for axis in range(len(of_output))])


def _product_axes(equation: str, at: int, n_axes: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The axes of the values and of the output in the order of batch, head, place and width, if an einsum of two tensors, number
    `at` of which is a pattern, is its product with values. `n_axes` are those of both tensors.

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
    """A pattern that waits for the product with its values; `storages` are those of the tensors that hold its shares."""

    def __init__(self, module: nn.Module, where: tuple[str | None, int], scores: Tensor, pattern: Tensor) -> None:
        self.module, self.where, self.scores, self.pattern = module, where, scores, pattern
        self.v: Tensor | None = None
        self.z: Tensor | None = None
        self.is_dropped = False
        self._held: list[Tensor] = []
        self.storages: set[int] = set()
        self.hold(pattern)

    def is_held(self, value: Any) -> bool:
        """Whether something is a tensor with the same shares."""
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self.storages

    def hold(self, tensor: Tensor) -> None:
        """Another tensor with the same shares. It stays alive, so that its memory is not used again."""
        self._held.append(tensor)
        self.storages.add(tensor.untyped_storage().data_ptr())
