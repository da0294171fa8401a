"""Captures the attention of a model while it runs its usual code path.

What transformers' interface of attention functions gives is wrapped, not registered under a new
name: there is no mask function for a new name, so padding and causality would be silently lost.
Wrapping is process-wide and is undone on any exit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from mhacli.attention.core import four_axes
from mhacli.errors import MhaError
from mhacli.models import foreign
from mhacli.settings import AttentionKind
from mhacli.usercode.door import on_behalf, ours, plainly
from mhacli.usercode.foreign import attention_within

from .layer_names import LayerKey, LayerNumbers, is_attention

InterceptionLevel = Literal["registry", "module", "sdpa", "softmax"]
"""How a call was captured, the most reliable first: by the function in transformers' registry; by
the modelling file's own `eager_attention_forward`; by torch's `scaled_dot_product_attention`; or
only by its softmax."""
KNOWN = frozenset(
    (
        "attention_mask",
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "is_causal",
        "key",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "module",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_bias",
        "position_embeddings",
        "position_ids",
        "query",
        "return_dict",
        "s_aux",
        "scaling",
        "sinks",
        "sliding_window",
        "softcap",
        "training",
        "use_cache",
        "value",
    )
)
"""Keywords of attention functions that are captured, or do not change the result, given the mask.
`sliding_window` is already in the mask. Source: transformers 5, integrations/."""
FORBIDDING = -9e3
"""A value up to this one, added to a score, masks its cell: code uses −∞, the lowest number of a
dtype, −1e5 and −1e4."""


class CallKey(NamedTuple):
    """The name of an attention within its layer, and the number of the layer."""

    title: str
    layer: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention of a model: the `name` of its module, its place in the pass, its tensors, and
    how it was captured.

    `layer` is the number of its layer. A module may compute several attentions in one layer; `part`
    counts the earlier ones.

    A call of a function has queries, keys and values after rotation and with cached ones, and the
    head outputs `z`. Then `mask` is bool (True = may attend), or is added to the scores, or is an
    object of the implementation. `causal` hides later keys; query 0 is key 0. `sinks` are scores in
    the softmax that contribute no value, one per head or per query.

    Attention written out in code has its final `scores` and its `pattern` instead of queries and
    keys, and neither v nor z if the product of pattern and values was not found.

    `unknown` names the keywords whose meaning is not known, and `dropout` after the softmax, for
    which z does not follow from the pattern. `is_token_first` says that the module's inputs have
    the tokens as first axis and the sequences as second; `is_changed` that the pattern is the
    weights that code made of a softmax, which do not follow from the scores; `is_unclear` that the
    first axis may be that of texts, or of the heads of one.

    Where each of several modules computes some heads of an attention, `first_head` is the number of
    heads before these; otherwise it is None.
    """

    name: str
    layer: int
    kind: AttentionKind
    part: int
    level: InterceptionLevel
    kernel: str
    v: Float[Tensor, "batch kv_head key d_v"] | None = None
    z: Float[Tensor, "batch head query d_v"] | None = None
    q: Float[Tensor, "batch head query d_head"] | None = None
    k: Float[Tensor, "batch kv_head key d_head"] | None = None
    scale: float = 1.0
    mask: Shaped[Tensor, "..."] | None = None
    causal: bool = False
    softcap: float | None = None
    bias: Float[Tensor, "..."] | None = None
    sinks: Float[Tensor, "..."] | None = None
    scores: Float[Tensor, "batch head query key"] | None = None
    pattern: Float[Tensor, "batch head query key"] | None = None
    unknown: tuple[str, ...] = ()
    is_token_first: bool = False
    is_changed: bool = False
    is_unclear: bool = False
    first_head: int | None = None

    @property
    def place(self) -> LayerKey:
        """Its kind and the number of its layer."""
        return self.kind, self.layer

    @property
    def key(self) -> CallKey:
        """What tells it from the other attentions of a pass."""
        return CallKey(self.title, self.layer)

    @property
    def title(self) -> str:
        """Its name within its layer: the name of its module, and the number of the module's
        attention.
        """
        return self.name if self.part == 0 else f"{self.name}, call {self.part + 1}"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)` of the pattern."""
        if self.scores is not None:
            return tuple(self.scores.shape)
        q, k, _ = self.qkv
        return (*q.shape[:3], k.shape[2])

    @property
    def device(self) -> torch.device:
        """The device on which it was computed."""
        return next(tensor for tensor in (self.q, self.scores) if tensor is not None).device

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of a call of a function."""
        assert self.q is not None
        assert self.k is not None
        assert self.v is not None
        return self.q, self.k, self.v

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def is_of_same(self, other: Call) -> bool:
        """Whether another call reads the same memory, as long as that of both is kept."""
        pairs = ((self.q, other.q), (self.v, other.v))
        return any(
            a is not None and b is not None and a.data_ptr() == b.data_ptr() for a, b in pairs
        )

    def holding(self, tensors: dict[str, Any]) -> Call:
        """The call with other tensors, by name, instead of its own."""
        held: dict[str, Any] = dict.fromkeys(self.tensors)
        return replace(self, **held | tensors)

    @property
    def unreadable(self) -> str | None:
        """The reason why its axes or its mask cannot be read, None if they can."""
        if self.is_unclear:
            return (
                "attention of some texts at a time, whose first axis may be that of texts or of"
                " heads (it can be shown in calls with one text)"
            )
        mask: Any = self.mask
        if mask is None:
            return None
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else (0,)
        is_of_keys = self.level != "sdpa" and len(shape) == 2  # flash-attention's, for padding
        sizes = zip(reversed(shape), reversed(self.shape), strict=False)
        has_axes = len(shape) <= len(self.shape) and all(n in (1, size) for n, size in sizes)
        if has_axes and not is_of_keys:
            return None
        return "attention whose mask is no tensor of batch, head, query and key"

    def _axes(self, name: str, tensor: Tensor) -> dict[Literal["query", "key"], int]:
        """The axes of queries and of keys of one of its tensors, without those that it lacks
        because all share a number.
        """
        if name in ("q", "z"):
            return {"query": 2}
        if name in ("k", "v"):
            return {"key": 2}
        if name == "sinks":
            return {"query": 2} if tensor.ndim == 3 else {}
        axes: dict[Literal["query", "key"], int] = {}
        if tensor.ndim > 1 and tensor.shape[-2] == self.shape[2]:
            axes["query"] = tensor.ndim - 2
        if tensor.shape[-1] > 1:
            axes["key"] = tensor.ndim - 1
        return axes

    def behind(self, n: int) -> Call:
        """The attention with `n` queries of zeros before its own."""
        padded: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            axis = self._axes(name, tensor).get("query")
            if axis is not None:
                zeros = tensor.new_zeros((*tensor.shape[:axis], n, *tensor.shape[axis + 1 :]))
                padded[name] = torch.cat([zeros, tensor], dim=axis)
        return replace(self, **padded)

    def cropped(self, queries: slice, keys: slice) -> Call:
        """The attention of some queries on some keys; a mask that is no tensor is not cropped.
        Where queries and keys begin at different places, a causal one has a mask instead.
        """
        fields: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            kept = [slice(None)] * tensor.ndim
            for axis, number in self._axes(name, tensor).items():
                kept[number] = queries if axis == "query" else keys
            fields[name] = tensor[tuple(kept)]
        if self.causal and queries.start and queries != keys:
            q_idx, k_idx = (torch.arange(n, device=self.device) for n in self.shape[2:])
            fields |= {"causal": False, "mask": k_idx[keys] <= q_idx[queries, None]}
        return replace(self, **fields)


# -------------------------------------------------------------------------------------- the capture


class Edit(NamedTuple):
    """What replaces the `z` of a call in the model, and how to make the call with the weights and
    the values of which it follows.
    """

    z: Tensor
    call: Call
    used: Callable[[], Call]


Take = Callable[[Call], Tensor | Edit | None]
"""Receives each call. Its tensors belong to the model, so copy or reduce them before returning. A
returned tensor replaces `z` in the model; None changes nothing."""

HeadModules = Literal["called", "apart", "joined"]
"""How attention is given of which each of several modules computes some heads: as attentions of
their own, as parts of one, when each was computed, or as one, when all were."""
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def captured(
    model: nn.Module,
    take: Take,
    *,
    batch: int = 1,
    anywhere: bool = False,
    edits: bool = False,
    heads: HeadModules = "called",
) -> Iterator[Watch]:
    """A context in which `take` receives every attention of `model` as it is computed.

    `batch` is the number of sequences, needed where code merges the axes of batch and heads.
    Attention of all tokens over all, or with an axis for heads, that is written out is captured
    `anywhere`, or only in modules that are named like attentions. Other models are not affected; a
    second capture waits for the first. If `take` returns None, nothing that the model computes is
    changed. What transformers' interface gives is wrapped: the functions of its table, and the
    `eager_attention_forward` of a modelling file. Functions are unwrapped in reverse order, also if
    a context that was opened earlier is closed first; it then captures nothing more. Whatever was
    opened first, what `edits` comes before what only receives.
    """
    watch = Watch(model, take, batch, anywhere=anywhere, heads=heads)
    watch.edits = edits
    with _ONE_AT_A_TIME, ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(watch.enter).remove)
        hooks.callback(register_module_forward_hook(watch.leave, always_call=True).remove)
        around = list[Watch]()
        while edits and _OPEN and not _OPEN[-1][0].edits:
            receiver, wrapped = _OPEN.pop()
            wrapped.close()
            around.append(receiver)
        for each in (watch, *reversed(around)):
            _OPEN.append((each, each.wrapped()))
        try:
            yield watch
        finally:
            watch.is_closed, _OF_THREAD.edit = True, None
            while _OPEN and _OPEN[-1][0].is_closed:
                _OPEN.pop()[1].close()


def modes_here() -> ExitStack:
    """Lets the open watches see the functions of torch in this thread, which has modes of its own,
    until the stack is closed.
    """
    with ExitStack() as modes:
        here = threading.get_ident()
        for watch, _ in _OPEN:
            if watch.writes_out and here not in watch.mode_threads:
                watch.mode_threads.add(here)
                modes.callback(watch.mode_threads.discard, here)
                modes.enter_context(watch)
        return modes.pop_all()


class _OfThread(threading.local):
    """What all watches share in a thread: whether a receiver computes, and nothing is the model's;
    and the last edit.
    """

    is_taking = False
    edit: Edit | None = None


_OF_THREAD = _OfThread()
_OPEN: list[tuple[Watch, ExitStack]] = []
"""The open watches with the functions that they wrap, the innermost first."""
_UNNAMED = ("query", "key", "value", "attention_mask")
"""The arguments of transformers' attention functions that follow the module without a name."""
_SDPA = nn.functional.scaled_dot_product_attention
_MULTI_HEAD = nn.functional.multi_head_attention_forward
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SOFTMAX = (torch.softmax, Tensor.softmax, nn.functional.softmax)
_SELECTING = ("__getitem__", "select", "unbind", "split", "chunk", "tensor_split", "narrow")
_JOINING = ("stack", "cat", "concat", "pad_sequence")
_PRODUCTS = ("matmul", "bmm", "__matmul__")
_SAME_WEIGHTS = (
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "expand",
    "contiguous",
    "clone",
    "dropout",
)
"""Functions that keep the weights of a pattern: changes of dtype or shape, and dropout, which does
nothing in evaluation."""


class _ModuleRun(NamedTuple):
    """A run of a module: its number among all, and how many calls were captured before it."""

    module: nn.Module
    number: int
    n_calls: int


@dataclass
class _PendingPattern:
    """A captured softmax that waits for its product with the values. `weights` are its result, and
    the tensors made of it, of `n_sequences`; `is_changed` says that their weights are others.
    """

    call: Call
    n_sequences: int
    weights: list[Tensor]
    is_changed: bool = False

    def is_in(self, value: Any) -> bool:
        """Whether a value is the pattern, or a tensor made of it."""
        return any(value is tensor for tensor in self.weights)


class Watch(TorchFunctionMode):
    """The state of a capture while a model runs: the running modules, a softmax that waits for its
    product with the values, and the receiver of calls. As a mode of torch it captures
    `scaled_dot_product_attention` and softmax called by a modelling file.

    `silent` are modules, with their classes, that are named like attentions but ran without any.
    `thread` is the only one whose calls are captured, None for all but those in `skipped`, which
    has by thread the module that runs without being captured. The modules `beginning`, by id, are
    entered once more when they have a thread. In `mode_threads` it is a mode by `modes_here`.
    """

    edits = False
    thread: int | None = None

    def __init__(
        self, model: nn.Module, take: Take, batch: int, *, anywhere: bool, heads: HeadModules
    ) -> None:
        super().__init__()
        self._anywhere = anywhere
        named = dict(model.named_modules())
        self.names = {id(module): name or type(module).__name__ for name, module in named.items()}
        self.batch = batch
        self.may_lack_batch = False
        self.is_closed = False
        self.silent: dict[str, str] = {}
        self.skipped: dict[int, nn.Module] = {}
        self.beginning = set[int]()
        self.mode_threads = set[int]()
        self._model = model
        self._take = take
        self._numbers = LayerNumbers(model)
        self._attentions = {
            id(module) for name, module in named.items() if is_attention(name, module)
        }
        self._joins_heads = heads == "joined"
        self._holders = dict[int, nn.Module]()
        for name, module in named.items():
            if heads != "called" and name and (holder := self._numbers.holder_of(name, named)):
                self._holders[id(module)] = named[holder]
        is_layer = self._numbers.is_layer
        self._layers = {id(module) for name, module in named.items() if is_layer(name)}
        self._n_runs = self._n_calls = 0
        self._is_inside = False
        self.writes_out = _writes_out(model)
        self.begin_pass()

    def wrapped(self) -> ExitStack:
        """Wraps the functions of attention until the stack is closed."""
        with ExitStack() as functions:
            functions.enter_context(foreign.attention_functions(self.watching))
            if self.writes_out:
                functions.enter_context(self)
            return functions.pop_all()

    def begin_pass(self) -> None:
        """Starts a forward pass. What an interrupted pass left is forgotten."""
        self._numbers.begin_pass()
        self._running: list[_ModuleRun] = []
        self._open: list[nn.Module] = []  # those that are named like attentions
        self._pending: _PendingPattern | None = None
        self._of_some_texts = WeakTensorKeyDictionary()
        self._n_heads = Counter[tuple[str, int, int]]()
        self._waiting: list[Call] = []

    # -------------------------------------------------------------------------- the running modules

    @ours()
    def enter(self, module: nn.Module, _: Any) -> None:
        """The hook before any module."""
        is_to_begin = self.thread is None and id(module) in self.beginning
        if id(module) not in self.names or is_to_begin or not self._is_here:
            return
        if module is self._model:
            self.begin_pass()
        self._n_runs += 1
        self._running.append(_ModuleRun(module, self._n_runs, self._n_calls))
        if id(module) in self._attentions:
            self._open.append(module)

    @ours()
    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        """The hook after any module, also if it raised."""
        if not self._running or self._running[-1].module is not module or not self._is_here:
            return  # of another model, or an earlier hook raised
        n_calls = self._running.pop().n_calls
        if id(module) not in self._attentions:
            return
        self._open.pop()
        if not self._open:  # its product of pattern and values cannot follow any more
            self._give_pending()
            if output is not None and self._n_calls == n_calls and any(module.children()):
                self.silent[self.names[id(module)]] = type(module).__name__
        if self._waiting and self._waiting[0].name == self.names[id(module)]:
            self._give_pending()
            waiting, self._waiting = self._waiting, []
            for call in _joined_heads(waiting):
                self._give(call)

    def _is_of_model(self, module: nn.Module) -> bool:
        """Whether what a module computes now is an attention of the model, or a part of one."""
        is_other = self.is_closed or _OF_THREAD.is_taking or not self._is_here
        return not (is_other or self._is_inside) and id(module) in self.names

    @property
    def _is_here(self) -> bool:
        """Whether the calls of this thread are captured."""
        here = threading.get_ident()
        return self.thread in (None, here) and here not in self.skipped

    # ------------------------------------------------------------------------------------ the calls

    def _call(self, module: nn.Module, level: InterceptionLevel, **seen: Any) -> Call:
        """A call by a module, with its place in the pass."""
        holder, member = self._holder_of(module)
        name, block = self.names[id(holder)], self._block_of(module)
        names = name, self.names[id(member)], self.names[id(block.module)]
        kind, layer, part = self._numbers.next(*names, block.number)
        self._n_calls += 1
        call = Call(
            name=name,
            level=level,
            kind=kind,
            layer=layer,
            part=part,
            is_token_first=isinstance(module, nn.MultiheadAttention) and not module.batch_first,
            **seen,
        )
        if holder is member:
            return call
        of_call = (name, part, block.number)
        first_head = self._n_heads[of_call]
        self._n_heads[of_call] += call.shape[1]
        return replace(call, first_head=first_head)

    def _holder_of(self, module: nn.Module) -> tuple[nn.Module, nn.Module]:
        """The running attention and the module in its list that computes some of its heads now;
        otherwise the module that makes a call.
        """
        for run in reversed(self._running):
            holder = self._holders.get(id(run.module))
            if holder is not None and holder in self._open:
                return holder, run.module
        return module, module

    def _block_of(self, module: nn.Module) -> _ModuleRun:
        """The run that makes the layer of a module: the outermost one that is a layer, else the
        outermost attention, else the innermost module.
        """
        for layers in (self._layers, self._attentions):
            for run in self._running:
                if id(run.module) in layers:
                    return run
        return self._running[-1] if self._running else _ModuleRun(module, 0, 0)

    def _give(self, call: Call) -> Tensor | None:
        """Passes a complete call, as it was edited, to the receiver. Returns the replacement of its
        `z`, if any.
        """
        edit = _OF_THREAD.edit
        if not self.edits and edit is not None and edit.call.is_of_same(call):
            used: dict[str, Any] = {**edit.used().tensors}
            used.pop("z", None)
            call = replace(call, **used)
        if self._joins_heads and call.first_head is not None:
            self._waiting.append(call)
            return None
        with foreign.replaced(_OF_THREAD, is_taking=True):
            changed = self._take(call)
        if self.edits:
            _OF_THREAD.edit = changed if isinstance(changed, Edit) else None
        return changed.z if isinstance(changed, Edit) else changed

    @ours(instead=lambda _self, _level, original: original)
    def watching(
        self, level: InterceptionLevel, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """An attention function of transformers, wrapped so that every call by a module of the
        model is captured.
        """

        @ours(instead=original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_of_model(module):
                return on_behalf(original, module, *args, **kwargs)
            with foreign.replaced(self, _is_inside=True):
                result = on_behalf(original, module, *args, **kwargs)
            arguments = dict(zip(_UNNAMED, args, strict=False)) | kwargs
            seen = _arguments(module, arguments, level)
            changed = self._give(self._call(module, level, z=result[0].transpose(1, 2), **seen))
            if changed is None:
                return result
            return (changed.transpose(1, 2).contiguous(), *result[1:])

        return wrapper

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs a function of torch, and captures it if it is part of an attention."""
        if not torch.compiler.is_compiling():  # which cannot trace the number of a thread
            if self._is_here:
                return self._watched(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        if self._running and (func is _SDPA or (self._open and func in _SOFTMAX)):
            # what is traced allows a message of fixed words alone
            raise MhaError(
                "a function made by torch.compile hides the attention within it", code="hidden"
            )
        return func(*args, **(kwargs or {}))

    @ours(instead=plainly)
    def _watched(self, func: Any, _types: Any, args: Any, given: Mapping[str, Any] | None) -> Any:
        """The result of a function of torch, which is captured if it is part of an attention."""
        kwargs = given or {}
        module = self._caller_of(func)
        if module is not None and func is _MULTI_HEAD:
            return self._multi_head(args, kwargs)
        result = on_behalf(func, *args, **kwargs)
        self._mark(func.__name__, args, kwargs, result)
        if module is None:
            return result
        if func is _SDPA:
            arguments = dict(zip(_SDPA_NAMES, args, strict=False)) | dict(kwargs)
            return self._sdpa(module, arguments, result)
        if func in _SOFTMAX:
            self._softmax(module, args, kwargs, result)
            return result
        if func is torch.einsum:
            return self._einsum(args, result)
        return self._follow(func, args, kwargs, result)

    def _caller_of(self, func: Any) -> nn.Module | None:
        """The module of the model that calls a function of torch, if the call may be one of an
        attention.
        """
        if self._open:
            module = self._open[-1]
        elif self._running and (func is _SDPA or self._anywhere):
            module = self._running[-1].module
        else:
            return None
        return module if self._is_of_model(module) else None

    def _mark(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Marks what is computed of some of the texts: their first axis is lost, or shorter."""
        if self.batch < 2 or not self._running or name in _JOINING:
            return
        marked = self._of_some_texts
        is_of_some = len(marked) and any(
            isinstance(value, Tensor) and value in marked for value in args
        )
        if is_of_some or (name in _SELECTING and _selects(self.batch, name, args, kwargs)):
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, Tensor):
                    marked[tensor] = True

    def _is_unclear(self, tensor: Tensor) -> bool:
        """Whether the first axis of a tensor may be that of texts or of the heads of one."""
        return tensor.ndim == 3 and tensor in self._of_some_texts

    def _sdpa(self, module: nn.Module, arguments: Mapping[str, Any], z: Tensor) -> Tensor:
        """The result of torch's own function, after its call was captured."""
        n = self._count(arguments["query"])
        q, k, v = (_by_head(arguments[name], n) for name in ("query", "key", "value"))
        seen: dict[str, Any] = {
            "scale": _scale(q, arguments.get("scale")),
            "mask": arguments.get("attn_mask"),
            "causal": bool(arguments.get("is_causal")),
            "kernel": foreign.sdpa_kernel(**arguments),
            "unknown": ("dropout",) if arguments.get("dropout_p") else (),
            "is_unclear": self._is_unclear(arguments["query"]),
        }
        changed = self._give(self._call(module, "sdpa", q=q, k=k, v=v, z=_by_head(z, n), **seen))
        return z if changed is None else changed.reshape(z.shape)

    def _multi_head(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Runs the function behind nn.MultiheadAttention, whose batch is its second axis, so that
        its operators are seen one by one.
        """
        query = args[0] if args else kwargs["query"]
        batch = query.shape[1] if query.ndim == 3 else 1
        state = foreign.replaced(self, batch=batch, may_lack_batch=False)
        with state:
            return on_behalf(attention_within, self, *args, **kwargs)

    # ------------------------------------------------------------------------ attention written out

    def _softmax(
        self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], pattern: Tensor
    ) -> None:
        """Keeps a softmax over keys until its product with the values."""
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if scores.ndim not in (3, 4) or dim not in (-1, scores.ndim - 1):
            return
        is_of_tokens = scores.ndim == 4 or scores.shape[-2] == scores.shape[-1]
        if not self._open and not (is_of_tokens and scores.shape[-1] > 1):
            return
        self._give_pending()
        n = self._count(scores)
        seen = {"scores": _by_head(scores, n), "pattern": _by_head(pattern, n)}
        is_unclear = self._is_unclear(scores)
        call = self._call(module, "softmax", kernel="softmax", is_unclear=is_unclear, **seen)
        self._pending = _PendingPattern(call, n, [pattern])

    def _follow(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Any:
        """The result of a function of the waiting pattern. A product with the values completes the
        call; a tensor of the same shape or the same weights stands for the pattern from then on.
        """
        pending, name = self._pending, func.__name__
        weights = next((a for a in args if pending is not None and pending.is_in(a)), None)
        if pending is None or weights is None:
            return result
        if name == "__setitem__" and weights is args[0]:
            pending.is_changed = True
        if not isinstance(result, Tensor):
            return result
        if name in _PRODUCTS and weights is args[0]:
            return self._product(pending, weights, args[1], result)
        keeps_weights = name in _SAME_WEIGHTS or (
            name == "masked_fill" and _empties_rows(weights, result)
        )
        if keeps_weights and result.numel() == weights.numel():
            pending.weights.append(result)
            if name == "dropout" and _drops(args, kwargs):
                pending.call = replace(pending.call, unknown=("dropout",))
        elif result.shape == weights.shape and result.is_floating_point():
            pending.weights.append(result)
            pending.is_changed = True
        return result

    def _product(self, pending: _PendingPattern, weights: Tensor, v: Tensor, z: Tensor) -> Tensor:
        """The head outputs, after the waiting pattern was captured with its values. In rows that
        became zeros all is masked.
        """
        n = pending.n_sequences
        call = replace(pending.call, v=_by_head(v, n), z=_by_head(z, n))
        if pending.is_changed:
            call = _with_weights(call, _by_head(weights.detach(), n))
        empty = (_by_head(weights, n) == 0).all(dim=-1, keepdim=True)
        if empty.any():
            assert call.scores is not None
            assert call.pattern is not None
            call = replace(
                call,
                scores=call.scores.masked_fill(empty, -torch.inf),
                pattern=call.pattern.masked_fill(empty, 0.0),
            )
        self._pending = None
        changed = self._give(call)
        return z if changed is None else changed.reshape(z.shape)

    def _einsum(self, args: Any, result: Tensor) -> Tensor:
        """Captures the product of the waiting pattern with the values if it is an einsum of two
        tensors, whatever the order of their axes.
        """
        equation, *tensors = args
        pending = self._pending
        if pending is None or len(tensors) != 2:
            return result
        at = next((i for i, tensor in enumerate(tensors) if pending.is_in(tensor)), None)
        if at is None or tensors[at].ndim < 3:
            return result
        weights = tensors[at]
        terms, _, output = equation.replace(" ", "").partition("->")
        both = terms.split(",")
        (*outer, query, key), values = both[at], both[1 - at]
        width = [letter for letter in values if letter not in both[at]]
        v_axes = [*outer, key, *width]
        z_axes = [*outer, query, *width]
        is_product = sorted(values) == sorted(v_axes) and sorted(output) == sorted(z_axes)
        if len(width) != 1 or not is_product:
            if result.shape == weights.shape:  # it mixes heads
                pending.weights.append(result)
                pending.is_changed = True
            return result
        z = torch.einsum(f"{output}->{''.join(z_axes)}", result)
        v = torch.einsum(f"{values}->{''.join(v_axes)}", tensors[1 - at])
        changed = self._product(pending, weights, v, z)
        return result if changed is z else torch.einsum(f"{''.join(z_axes)}->{output}", changed)

    def _give_pending(self) -> Tensor | None:
        """Passes on a pattern that still waits for its product with the values, if there is one."""
        pending, self._pending = self._pending, None
        return None if pending is None else self._give(pending.call)

    def _count(self, first: Tensor) -> int:
        """The number of sequences of a tensor with a row for each query, whose code may merge the
        axes of sequences and heads, or leave one out.
        """
        if first.ndim != 3:
            return first.shape[:-3].numel()
        is_one = self.may_lack_batch and first.shape[1] == self.batch
        return 1 if is_one or first.shape[0] % self.batch else self.batch


def are_of_one_attention(
    q: Sequence[int], k: Sequence[int], v: Sequence[int] | None = None
) -> bool:
    """Whether queries, keys and values of these shapes, of four axes each, are those of one
    attention.
    """
    if v is not None and (*v[:3],) != (*k[:3],):
        return False
    return k[1] > 0 and (q[0], q[1] % k[1], q[3]) == (k[0], 0, k[3])


def _with_weights(call: Call, weights: Tensor) -> Call:
    """A call with the weights that code made of its pattern. Those that are masked, and the others
    scaled, are the softmax of fewer scores.
    """
    assert call.scores is not None
    scores = call.scores.detach().masked_fill(weights == 0, -torch.inf)
    same = scores.double().softmax(dim=-1).nan_to_num(nan=0.0)
    gap = (same - weights).abs().max()
    is_changed = not bool(gap <= 8 * torch.finfo(weights.dtype).eps)
    return replace(call, pattern=weights, scores=scores, is_changed=is_changed)


def _joined_heads(calls: Sequence[Call]) -> Iterator[Call]:
    """The calls of modules that compute some heads each as a call of all heads. Each stays a call
    of its own if they differ in more than their numbers.
    """
    by_part = dict[int, list[Call]]()
    for call in calls:
        by_part.setdefault(call.part, []).append(call)
    for part, of_part in by_part.items():
        first = of_part[0]
        if any(_form(call) != _form(first) for call in of_part):
            for number, call in enumerate(of_part):
                yield replace(call, first_head=None, part=len(by_part) * number + part)
            continue
        joined: dict[str, Any] = {"first_head": None}
        for name in first.tensors:
            tensors = [getattr(call, name) for call in of_part]
            if name in ("mask", "bias"):
                shape = (*first.shape[:2], -1, -1)
                tensors = [four_axes(tensor).expand(shape) for tensor in tensors]
            joined[name] = torch.cat(tensors, dim=0 if tensors[0].ndim == 1 else 1)
        yield replace(first, **joined)


def _form(call: Call) -> Call:
    """A call with the forms of its tensors instead of their numbers."""
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in call.tensors.items()}
    return replace(call.holding(forms), first_head=None)


def _selects(batch: int, name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function takes some texts out of a tensor, whose first axis they are."""
    if not args or not isinstance(args[0], Tensor) or args[0].shape[:1] != (batch,):
        return False
    if name == "__getitem__":
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        is_all = isinstance(first, slice) and first == slice(None)
        return not (is_all or first is None or first is Ellipsis)
    at = 1 if name in ("select", "unbind", "narrow") else 2
    axis = args[at] if len(args) > at else kwargs.get("dim", 0)
    return axis in (0, -args[0].ndim)


def _empties_rows(pattern: Tensor, filled: Tensor) -> bool:
    """Whether weights became zeros in whole rows alone."""
    return torch.equal(filled, pattern.masked_fill((filled == 0).all(dim=-1, keepdim=True), 0.0))


def _drops(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of dropout changes weights."""
    arguments = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    is_training = arguments.get("training", arguments.get("train", True))
    return bool(arguments.get("p", 0.5) and is_training)


def _by_head(tensor: Tensor, n: int) -> Tensor:
    """A tensor of `n` sequences with a separate axis for them, also if all of them share it."""
    if tensor.ndim == 4 and tensor.shape[0] == n:
        return tensor
    rows = tensor.reshape(-1, *tensor.shape[-2:])
    is_of_one = tensor.ndim > 3 and tensor.shape[:-3].numel() == 1
    if is_of_one or len(rows) % n:
        return rows.expand(n, -1, -1, -1)
    return rows.reshape(n, -1, *rows.shape[-2:])


def _scale(q: Tensor, given: float | None) -> float:
    """The factor of the scores of a call, by default that of the width of its queries."""
    return float(q.shape[-1] ** -0.5 if given is None else given)


def _arguments(
    module: nn.Module, arguments: Mapping[str, Any], level: InterceptionLevel
) -> dict[str, Any]:
    """The fields of `Call` for the arguments of an attention function of transformers. `unknown`
    are those that are neither known nor None nor False.
    """
    q, k, v = (arguments[name] for name in _UNNAMED[:3])
    mask = arguments.get("attention_mask")
    is_registered = level == "registry"
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = is_registered and mask is None and bool(is_causal) and q.shape[2] > 1
    sinks = arguments.get("sinks") if arguments.get("s_aux") is None else arguments["s_aux"]
    if isinstance(sinks, Tensor) and sinks.ndim == 4:
        sinks = sinks.squeeze(-1)
    dropout = arguments.get("dropout") if is_registered or module.training else 0
    unknown = sorted(
        name
        for name, value in arguments.items()
        if name not in KNOWN and value is not None and value is not False
    )
    if dropout:
        unknown.append("dropout")
    kernel: str | None = "eager"
    if is_registered:
        kernel = foreign.attn_implementation(getattr(module, "config", None))
    if kernel == "sdpa":
        choice = {"dropout_p": dropout or 0.0, "is_causal": causal}
        is_grouped = q.shape[1] != k.shape[1]
        kernel = foreign.sdpa_kernel(q, k, v, mask, enable_gqa=is_grouped, **choice)
    return {
        "q": q,
        "k": k,
        "v": v,
        "scale": _scale(q, arguments.get("scaling")),
        "mask": mask,
        "causal": causal,
        "softcap": arguments.get("softcap"),
        "bias": arguments.get("position_bias"),
        "sinks": sinks,
        "kernel": kernel or "eager",
        "unknown": tuple(unknown),
    }


# -------------------------------------------------------------------- what is wrapped, and put back


_LIBRARIES = ("torch.", "transformers.pytorch_utils")
"""The modules that define the layers inside an attention."""


def _writes_out(model: nn.Module) -> bool:
    """Whether an attention of the model may not use transformers' interface, and must be captured
    at torch's functions.
    """
    attention_files = set[str]()
    for name, module in model.named_modules():
        file = type(module).__module__
        is_foreign = not file.startswith(("torch.", "transformers."))
        if is_foreign or isinstance(module, nn.MultiheadAttention):
            return True
        if is_attention(name, module) and not file.startswith(_LIBRARIES):
            attention_files.add(file)
    return not all(map(foreign.uses_attention_functions, attention_files))
