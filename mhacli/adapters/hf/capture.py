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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhacli.adapters.hf.inputs import called
from mhacli.adapters.hf.kernels import KernelWatch
from mhacli.adapters.hf.layer_names import LayerNumbers, is_numbered
from mhacli.spec.tokens import AttentionKind

Take = Callable[["Call"], Tensor | None]
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
    """The same for a `watch` whose batch may change from pass to pass."""
    with _ONE_AT_A_TIME, ExitStack() as stack:
        stack.enter_context(_hooked(model, watch))
        for wrap in (_wrapped_registry, _wrapped_files):
            stack.enter_context(wrap(model, watch))
        if _writes_out(model):
            stack.enter_context(_FunctionWatch(watch))
        yield


class Watch:
    """What is known while a model runs: whose attention is being computed, and who wants to hear of it."""

    def __init__(self, model: nn.Module, take: Take, batch: int) -> None:
        self.names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self.batch, self.is_inside = batch, False
        self.pending: _Pending | None = None
        self.open: list[nn.Module] = []
        self.blocks: list[nn.Module] = []
        self.n_runs = 0
        self._take, self._is_pair = take, bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.begin_pass()

    def begin_pass(self) -> None:
        """A new forward pass counts its layers anew."""
        self._numbers, self.pending = LayerNumbers(is_pair=self._is_pair), None

    def where(self) -> tuple[str | None, int]:
        """The outermost module of a list that is being run, if any, and which run that is."""
        return self.names[id(self.blocks[0])] if self.blocks else None, self.n_runs

    def tell(
        self, kind: type[Call], module: nn.Module, level: InterceptionLevel, where: tuple[str | None, int], **seen: Any
    ) -> Tensor | None:
        """A call that is complete, and was made `where`. Returns what takes the place of its `z`, if anything."""
        name, (block, run) = self.names[id(module)], where
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"
        layer, of, part = self._numbers.next(name, block or name, run)
        place: dict[str, Any] = {"name": name, "layer": layer, "kind": of, "part": part}
        call = kind(**place, level=level, implementation=implementation, **seen)
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

        def by_head(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.reshape(self.batch, -1, *tensor.shape[-2:])

        return self.tell(
            SoftmaxCall,
            pending.module,
            "softmax",
            pending.where,
            **{name: by_head(getattr(pending, name)) for name in ("scores", "pattern", "v", "z")},
            unknown=("dropout",) if pending.is_dropped else (),
        )

    def watched(self, level: InterceptionLevel, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with every call of it by a module of the model told."""
        signature = inspect.signature(original)

        @functools.wraps(original)  # whoever wraps this in turn asks for its signature
        def watching(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.is_inside or id(module) not in self.names:
                return original(module, *args, **kwargs)
            self.is_inside, kernel = True, KernelWatch()
            try:
                with kernel:
                    result = called(original, module, *args, **kwargs)
            finally:
                self.is_inside = False
            given = _flat(signature.bind(module, *args, **kwargs), signature)
            seen = _seen(module, given, result[0].transpose(1, 2), kernel, level)
            changed = self.tell(ScoredCall, module, level, self.where(), **seen)
            return result if changed is None else (changed.transpose(1, 2).contiguous(), *result[1:])

        return watching


def _flat(bound: inspect.BoundArguments, signature: inspect.Signature) -> dict[str, Any]:
    """All arguments by name, those behind ** among them."""
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _seen(
    module: nn.Module, given: dict[str, Any], z: Tensor, kernel: KernelWatch, level: InterceptionLevel
) -> dict[str, Any]:
    """What a call of an attention function holds, by the fields of `ScoredCall`."""
    q, scaling, mask = given["query"], given.get("scaling"), given.get("attention_mask")
    is_causal = given.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    is_training = bool(given.get("dropout")) and (level == "registry" or module.training)
    return {
        "q": q,
        "k": given["key"],
        "v": given["value"],
        "z": z,
        "scale": float(q.shape[-1] ** -0.5 if scaling is None else scaling),
        "mask": mask,
        "causal": level == "registry" and mask is None and is_causal and q.shape[2] > 1,
        "softcap": given.get("softcap"),
        "bias": given.get("position_bias"),
        "sinks": _sinks(given),
        "lse": kernel.lse_of(q),
        "kernel": kernel.kernel or ("math" if level == "registry" else "eager"),
        "unknown": unknown_keywords(given) + (("dropout",) if is_training else ()),
    }


def _sinks(given: Mapping[str, Any]) -> Tensor | None:
    """The scores of sinks: one of each head, or of each query, in which case they come as one more key."""
    sinks = given.get("s_aux") if given.get("s_aux") is not None else given.get("sinks")
    return sinks.squeeze(-1) if isinstance(sinks, Tensor) and sinks.ndim == 4 else sinks


# ------------------------------------------------------------------------------------------------ what is wrapped, and put back


@contextmanager
def _hooked(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Hears of the beginning of a pass, and which attention modules and which of lists are being run, innermost last."""

    def followed(running: list[nn.Module], followed_module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, *_: Any) -> None:
            if not watch.blocks:  # what begins outside of any block is a layer, or holds all
                watch.n_runs += 1
            running.append(module)

        def leave(module: nn.Module, *_: Any) -> None:
            if running and running[-1] is module:  # else a hook before ours raised, and it was never entered
                running.pop()
            if not watch.open:  # no product of its pattern and values can follow
                watch.tell_pending()

        yield followed_module.register_forward_pre_hook(enter)
        yield followed_module.register_forward_hook(leave, always_call=True)

    handles = [model.register_forward_pre_hook(lambda *_: watch.begin_pass())]
    for name, module in model.named_modules():
        handles += followed(watch.open, module) if is_attention(name, module) else ()
        handles += followed(watch.blocks, module) if is_numbered(name) else ()
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

    configs = (getattr(module, "config", None) for module in model.modules())
    wanted = {getattr(config, "_attn_implementation", None) for config in configs if config is not None}
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
    """Whether some attention of the model goes past the registry, and has to be seen by torch's own functions."""
    parts = (module for name, module in model.named_modules() if is_attention(name, module))
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
        if self._watch.is_inside or not self._watch.open:
            return func(*args, **kwargs)
        if func is _SDPA:
            return self._sdpa(args, kwargs)
        if func is _MULTI_HEAD:
            return self._multi_head(args, kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and isinstance(result, Tensor):
            self._softmax(args, kwargs, result)
        elif self._watch.pending is not None and args and isinstance(result, Tensor):
            return self._follow(self._watch.pending, func, args, kwargs, result)
        return result

    def _sdpa(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        kernel = KernelWatch()
        with kernel:
            z = called(_SDPA, *args, **kwargs)
        given = dict(zip(_SDPA_NAMES, args, strict=False)) | dict(kwargs)
        q, scale = self._by_head(given["query"]), given.get("scale")
        changed = self._watch.tell(
            ScoredCall,
            self._watch.open[-1],
            "sdpa",
            self._watch.where(),
            q=q,
            k=self._by_head(given["key"]),
            v=self._by_head(given["value"]),
            z=self._by_head(z),
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
        before, self._watch.batch = self._watch.batch, query.shape[1] if query.ndim == 3 else 1
        try:
            with self:
                return called(_SEEN_MULTI_HEAD, *args, **kwargs)
        finally:
            self._watch.batch = before

    def _by_head(self, tensor: Tensor) -> Tensor:
        """Queries, keys or values with an axis for heads, of which code without one has one, or lays them into the batch."""
        return tensor if tensor.ndim != 3 else tensor.reshape(self._watch.batch, -1, *tensor.shape[-2:])

    def _softmax(self, args: Any, kwargs: Mapping[str, Any], pattern: Tensor) -> None:
        """A softmax over the last axis of something with a query and a key axis waits for its product."""
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        rows = scores.shape[0] if scores.ndim == 3 else scores.shape[0] * scores.shape[1] if scores.ndim == 4 else 0
        if rows and rows % self._watch.batch == 0 and dim in (-1, scores.ndim - 1):
            self._watch.tell_pending()
            self._watch.pending = _Pending(self._watch.open[-1], self._watch.where(), scores, pattern)

    def _follow(self, pending: _Pending, func: Any, args: Any, kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
        if not isinstance(args[0], Tensor) or args[0].untyped_storage().data_ptr() not in pending.storages:
            return result
        if func in _PRODUCTS:
            pending.v, pending.z = args[1], result
            changed = self._watch.tell_pending()
            return result if changed is None else changed.reshape(result.shape)
        if func in _SAME_SHARES and result.numel() == pending.pattern.numel():
            pending.hold(result)
            pending.is_dropped |= func in _DROPPING and _drops(args, kwargs)
        return result


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

    def hold(self, tensor: Tensor) -> None:
        """Another tensor with the same shares. It stays alive, so that its memory is not used again."""
        self._held.append(tensor)
        self.storages.add(tensor.untyped_storage().data_ptr())


# --------------------------------------------------------------------------------------------------------------- a call


InterceptionLevel = Literal["registry", "module", "sdpa", "softmax"]
"""How a call was seen, the surest way first: by the function that transformers' registry holds for the implementation in use;
by the modelling file's own `eager_attention_forward`; by torch's `scaled_dot_product_attention`; or only by its softmax."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention: the `name` of its module, its place in the pass, and how it was seen.

    `layer` is the number of its layer. A module may compute several attentions in one layer: `part` counts those before.
    `v` are the values and `z` what it gave, None where the product of the pattern and the values was not found. `unknown`
    names the keywords that the function got and whose meaning is not known here.
    """

    name: str
    layer: int
    kind: AttentionKind
    part: int
    level: InterceptionLevel
    implementation: str
    v: Float[Tensor, "batch kv_head key d_v"] | None = None
    z: Float[Tensor, "batch head query d_v"] | None = None
    unknown: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What tells it from the others of its layer: the name of its module, and which of the module's attentions it is."""
        return self.name if self.part == 0 else f"{self.name}, call {self.part + 1}"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)` of the pattern."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where it was computed."""
        raise NotImplementedError

    def cropped(self, queries: slice, keys: slice) -> Call:
        """The attention from some queries to some keys."""
        raise NotImplementedError

    @property
    def has_dropout(self) -> bool:
        """Whether weights were set to 0 at random behind the softmax: what it gave is then not of the weights that are shown."""
        return any(name in DROPOUT for name in self.unknown)

    @property
    def extras(self) -> dict[str, str]:
        """What changes the scores beside scale, softcap, bias and sinks, by keyword, each in words for a reader."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ScoredCall(Call):
    """An attention whose queries, keys and values were seen, after any rotation and from any cache.

    `mask` is bool (True = may attend) or added to the scores; an implementation may have an object of its own. `causal` hides
    later keys, query 0 being key 0. `sinks` are scores that take part in the softmax and give nothing, one of each head or of
    each query. `lse` is the log-sum-exp that the `kernel` told, if any.
    """

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_v"]
    z: Float[Tensor, "batch head query d_v"]
    scale: float
    mask: Shaped[Tensor, "..."] | None = None
    causal: bool = False
    softcap: float | None = None
    bias: Float[Tensor, "..."] | None = None
    sinks: Float[Tensor, " head"] | Float[Tensor, "batch head query"] | None = None
    lse: Float[Tensor, "batch head query"] | None = None
    kernel: str = "eager"

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)`."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def device(self) -> torch.device:
        """That of the queries."""
        return self.q.device

    def cropped(self, queries: slice, keys: slice) -> ScoredCall:
        """The attention from some queries to some keys; a mask that is no tensor stays whole."""
        q_len, k_len = self.shape[2:]

        def cells(added: Tensor | None) -> Tensor | None:
            if not isinstance(added, Tensor):
                return added
            added = added[..., keys] if added.shape[-1] == k_len else added
            return added[..., queries, :] if added.ndim > 1 and added.shape[-2] == q_len else added

        return replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, keys],
            v=self.v[:, :, keys],
            z=self.z[:, :, queries],
            mask=cells(self.mask),
            bias=cells(self.bias),
            sinks=self.sinks if self.sinks is None or self.sinks.ndim != 3 else self.sinks[:, :, queries],
            lse=None if self.lse is None else self.lse[:, :, queries],
        )

    @property
    def scoring(self) -> dict[str, Any]:
        """What makes scores of the products of queries and keys, mask and bias aside, by the fields of `Scores`."""
        return {"scale": self.scale, "softcap": self.softcap}

    @property
    def sink_scores(self) -> Float[Tensor, "_batch head _query"] | None:
        """The scores of sinks, with an axis of 1 where batch and query do not matter."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 3 else self.sinks.reshape(1, -1, 1)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCall(Call):
    """An attention written out by hand, of which softmax was seen: `scores` with everything added, and the `pattern`."""

    scores: Float[Tensor, "batch head query key"]
    pattern: Float[Tensor, "batch head query key"]

    def cropped(self, queries: slice, keys: slice) -> SoftmaxCall:
        """The attention from some queries to some keys."""
        return replace(
            self,
            scores=self.scores[:, :, queries, keys],
            pattern=self.pattern[:, :, queries, keys],
            v=None if self.v is None else self.v[:, :, keys],
            z=None if self.z is None else self.z[:, :, queries],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """`(batch, head, query, key)`."""
        return tuple(self.scores.shape)

    @property
    def device(self) -> torch.device:
        """That of the scores."""
        return self.scores.device


NEUTRAL = frozenset((
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "key", "labels",
    "layer_idx", "logits_to_keep", "max_length_k", "max_length_q", "module", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "query",
    "return_dict", "sliding_window", "training", "use_cache", "value",
))  # fmt: skip
"""What an attention function takes besides what is captured, and that does not change what it computes beside its mask.
`sliding_window` is in the mask already, where the implementation takes one. Source: transformers 5, integrations/."""
DROPOUT = frozenset(("dropout", "dropout_p"))
"""Those of `Call.unknown` that are known for what they are."""
COMPUTED = frozenset(("is_causal", "position_bias", "s_aux", "scaling", "sinks", "softcap"))
"""What it takes and that does change it."""


def unknown_keywords(given: dict[str, Any]) -> tuple[str, ...]:
    """The keywords that may carry mathematics that is not known here: neither understood nor None nor False."""
    return tuple(
        sorted(
            name
            for name, value in given.items()
            if name not in NEUTRAL | COMPUTED and value is not None and value is not False
        )
    )
