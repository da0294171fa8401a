"""Captures the attention of a model while it runs its usual code path.

What transformers' interface of attention functions gives is wrapped, not registered under a new
name: there is no mask function for a new name, so padding and causality would be silently lost.
Wrapping is process-wide and is undone on any exit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from mhacli.errors import MhaError
from mhacli.models.layer_names import LayerNumbers, is_attention, is_numbered
from mhacli.text.tokens import AttentionKind

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
    the tokens as first axis and the sequences as second.
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
    sinks: Float[Tensor, " head"] | Float[Tensor, "batch head query"] | None = None
    scores: Float[Tensor, "batch head query key"] | None = None
    pattern: Float[Tensor, "batch head query key"] | None = None
    unknown: tuple[str, ...] = ()
    is_token_first: bool = False

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

    def holding(self, tensors: dict[str, Any]) -> Call:
        """The call with other tensors, by name, instead of its own."""
        held: dict[str, Any] = dict.fromkeys(self.tensors)
        return replace(self, **held | tensors)

    @property
    def unread_mask(self) -> str | None:
        """The reason why its mask cannot be read, None if it can or there is none."""
        mask: Any = self.mask
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else (0,)
        is_of_keys = (
            self.level != "sdpa" and len(shape) == 2
        )  # flash-attention has a mask for padding only
        sizes = zip(reversed(shape), reversed(self.shape), strict=False)
        is_read = (
            not is_of_keys
            and len(shape) <= len(self.shape)
            and all(n in (1, of) for n, of in sizes)
        )
        return (
            None
            if mask is None or is_read
            else "attention whose mask is no tensor of batch, head, query and key"
        )

    def behind(self, n: int) -> Call:
        """The attention with `n` queries of zeros before its own."""
        padded: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            widths = (n, 0) if name == "sinks" else (0, 0, n, 0)
            axis = tensor.ndim - len(widths) // 2
            if name not in ("k", "v") and axis >= 0 and tensor.shape[axis] == self.shape[2]:
                padded[name] = torch.nn.functional.pad(tensor, widths)
        return replace(self, **padded)

    def cropped(self, queries: slice, keys: slice) -> Call:
        """The attention of some queries on some keys; a mask that is no tensor is not cropped.
        Where queries and keys begin at different places, a causal one has a mask instead.
        """
        q_len, k_len = self.shape[2:]
        cut: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            if name in ("q", "z", "k", "v"):
                cut[name] = tensor[:, :, queries if name in ("q", "z") else keys]
            elif name == "sinks":
                cut[name] = tensor[:, :, queries] if tensor.ndim == 3 else tensor
            else:
                cells = tensor[..., keys] if tensor.shape[-1] == k_len else tensor
                cut[name] = (
                    cells[..., queries, :] if cells.ndim > 1 and cells.shape[-2] == q_len else cells
                )
        if self.causal and queries.start and queries != keys:
            rows, columns = (torch.arange(n, device=self.device) for n in (q_len, k_len))
            cut |= {"causal": False, "mask": columns[keys] <= rows[queries, None]}
        return replace(self, **cut)


# -------------------------------------------------------------------------------------- the capture


Take = Callable[[Call], Tensor | None]
"""Receives each call. Its tensors belong to the model, so copy or reduce them before returning. A
returned tensor replaces `z` in the model; None changes nothing."""

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def captured(
    model: nn.Module, take: Take, *, batch: int = 1, anywhere: bool = False
) -> Iterator[Watch]:
    """A context in which `take` receives every attention of `model` as it is computed.

    `batch` is the number of sequences, needed where code merges the axes of batch and heads.
    Attention of all tokens over all that is written out is captured `anywhere`, or only in modules
    that are named like attentions. Other models are not affected; a second capture waits for the
    first. If `take` returns None, nothing that the model computes is changed. What transformers'
    interface gives is wrapped: the functions of its table, and the `eager_attention_forward` of a
    modelling file. Functions are unwrapped in reverse order, also if a context that was opened
    earlier is closed first; it then captures nothing more.
    """
    watch = Watch(model, take, batch, anywhere=anywhere)
    with _ONE_AT_A_TIME, ExitStack() as hooks:
        hooks.callback(register_module_forward_pre_hook(watch.enter).remove)
        hooks.callback(register_module_forward_hook(watch.leave, always_call=True).remove)
        with ExitStack() as wrapped:
            if "transformers.modeling_utils" in sys.modules:
                interface = sys.modules["transformers.modeling_utils"].AttentionInterface
                of_table, chosen = interface.__getitem__, interface.get_interface
                functions: dict[str, Any] = {
                    "__getitem__": lambda table, name: watch.watching(
                        "registry", of_table(table, name)
                    ),
                    "get_interface": lambda table, name, usual: chosen(
                        table, name, watch.watching("module", usual)
                    ),
                }
                wrapped.enter_context(patch.multiple(interface, **functions))
            if _writes_out(model):
                wrapped.enter_context(watch)
            _OPEN.append((watch, wrapped.pop_all()))
        try:
            yield watch
        finally:
            watch.is_closed = True
            while _OPEN and _OPEN[-1][0].is_closed:
                _OPEN.pop()[1].close()


_OPEN: list[tuple[Watch, ExitStack]] = []
"""The open watches with the functions that they wrap, the innermost first."""
_GIVEN = ("query", "key", "value", "attention_mask")
"""The arguments of transformers' attention functions that are given without their names, behind the
module."""
_SDPA, _MULTI_HEAD = (
    nn.functional.scaled_dot_product_attention,
    nn.functional.multi_head_attention_forward,
)
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SOFTMAX = (torch.softmax, Tensor.softmax, nn.functional.softmax)
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


class Watch(TorchFunctionMode):
    """The state of a capture while a model runs: the running modules, a softmax that waits for its
    product with the values, and the receiver of calls. As a mode of torch it captures
    `scaled_dot_product_attention` and softmax called by a modelling file.

    `silent` are modules, with their classes, that are named like attentions but ran without any.
    While a receiver of any watch computes, `is_taking`, nothing is the model's.
    """

    is_taking = False

    def __init__(self, model: nn.Module, take: Take, batch: int, *, anywhere: bool) -> None:
        super().__init__()
        self._anywhere = anywhere
        named = dict(model.named_modules())
        self.names = {id(module): name or type(module).__name__ for name, module in named.items()}
        self.batch, self.may_lack_batch = batch, False
        self.is_closed = False
        self.silent: dict[str, str] = {}
        self._model, self._take, self._numbers = model, take, LayerNumbers(model)
        self._attentions = {
            id(module) for name, module in named.items() if is_attention(name, module)
        }
        self._numbered = {id(module) for name, module in named.items() if is_numbered(name)}
        self._n_runs = self._n_calls = 0
        self._is_inside = False
        self.begin_pass()

    def begin_pass(self) -> None:
        """Starts a forward pass. What an interrupted pass left is forgotten."""
        self._numbers.begin_pass()
        self._running: list[tuple[nn.Module, int, int]] = []
        self._open: list[nn.Module] = []  # those that are named like attentions
        self._pending: Call | None = None
        self._n_sequences, self._held = 1, list[Tensor]()

    # -------------------------------------------------------------------------- the running modules

    def enter(self, module: nn.Module, _: Any) -> None:
        """The hook before any module."""
        if module is self._model:
            self.begin_pass()
        if id(module) not in self.names:
            return
        self._n_runs += 1
        self._running.append((module, self._n_runs, self._n_calls))
        if id(module) in self._attentions:
            self._open.append(module)

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        """The hook after any module, also if it raised."""
        if not self._running or self._running[-1][0] is not module:
            return  # of another model, or an earlier hook raised
        *_, n_calls = self._running.pop()
        if id(module) not in self._attentions:
            return
        self._open.pop()
        if not self._open:  # its product of pattern and values cannot follow any more
            self._give_pending()
            if output is not None and self._n_calls == n_calls and any(module.children()):
                self.silent[self.names[id(module)]] = type(module).__name__

    def _is_of_model(self, module: nn.Module) -> bool:
        """Whether what a module computes now is an attention of the model, or a part of one."""
        return (
            not (self._is_inside or self.is_closed or Watch.is_taking) and id(module) in self.names
        )

    # ------------------------------------------------------------------------------------ the calls

    def _call(self, module: nn.Module, level: InterceptionLevel, **seen: Any) -> Call:
        """A call by a module, with its place in the pass. Its layer is the outermost module of a
        list, else the outermost attention, else the innermost module.
        """
        name = self.names[id(module)]
        layers = [
            run
            for of in (self._numbered, self._attentions)
            for run in self._running
            if id(run[0]) in of
        ]
        block, n_run, _ = next(iter([*layers, *self._running[-1:]]), (module, 0, 0))
        kind, layer, part = self._numbers.next(name, self.names[id(block)], n_run)
        self._n_calls += 1
        is_token_first = isinstance(module, nn.MultiheadAttention) and not module.batch_first
        place: dict[str, Any] = {
            "kind": kind,
            "layer": layer,
            "part": part,
            "is_token_first": is_token_first,
        }
        return Call(name=name, level=level, **place, **seen)

    def _give(self, call: Call) -> Tensor | None:
        """Passes a complete call to the receiver. Returns the replacement of its `z`, if any."""
        with patch.object(Watch, "is_taking", True):
            return self._take(call)

    def watching(
        self, level: InterceptionLevel, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """An attention function of transformers, wrapped so that every call by a module of the
        model is captured.
        """

        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_of_model(module):
                return original(module, *args, **kwargs)
            with patch.object(self, "_is_inside", True):
                result = original(module, *args, **kwargs)
            seen = _arguments(module, dict(zip(_GIVEN, args, strict=False)) | kwargs, level)
            changed = self._give(self._call(module, level, z=result[0].transpose(1, 2), **seen))
            return (
                result if changed is None else (changed.transpose(1, 2).contiguous(), *result[1:])
            )

        return wrapper

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs a function of torch, and captures it if it is part of an attention."""
        kwargs = kwargs or {}
        if (
            torch.compiler.is_compiling()
        ):  # this is traced, which allows a message of fixed words alone
            if self._running and (func is _SDPA or (self._open and func in _SOFTMAX)):
                raise MhaError(
                    "a function made by torch.compile hides the attention within it", code="hidden"
                )
            return func(*args, **kwargs)
        running = self._open or [module for module, *_ in self._running[-1:]]
        if not (self._open or func is _SDPA or self._anywhere) or not (
            running and self._is_of_model(running[-1])
        ):
            return func(*args, **kwargs)
        if func is _MULTI_HEAD:
            return self._multi_head(args, kwargs)
        result = func(*args, **kwargs)
        if func is _SDPA:
            return self._sdpa(
                running[-1], dict(zip(_SDPA_NAMES, args, strict=False)) | dict(kwargs), result
            )
        if func in _SOFTMAX:
            scores = args[0] if args else kwargs["input"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            is_pattern = bool(self._open) or scores.shape[-2] == scores.shape[-1] > 1
            # kept until its product with the values
            if scores.ndim in (3, 4) and dim in (-1, scores.ndim - 1) and is_pattern:
                self._give_pending()
                n, self._held = self._count(scores), [result]
                seen = {"scores": _by_head(scores, n), "pattern": _by_head(result, n)}
                self._n_sequences = n
                self._pending = self._call(running[-1], "softmax", kernel="softmax", **seen)
        elif func is torch.einsum:
            return self._einsum(args, result)
        elif (
            args
            and self._pending is not None
            and self._is_pattern(args[0])
            and isinstance(result, Tensor)
        ):
            name = func.__name__
            if name in _PRODUCTS:
                return self._product(args[0], args[1], result)
            keeps = name in _SAME_WEIGHTS or (
                name == "masked_fill" and _empties_rows(args[0], result)
            )
            if keeps and result.numel() == self._held[0].numel():
                self._held.append(result)
                given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
                is_training = given.get("training", given.get("train", True))
                if name == "dropout" and given.get("p", 0.5) and is_training:
                    self._pending = replace(self._pending, unknown=("dropout",))
        return result

    def _sdpa(self, module: nn.Module, given: Mapping[str, Any], z: Tensor) -> Tensor:
        """The result of torch's own function, after its call was captured."""
        n, scale = self._count(given["query"]), given.get("scale")
        q, k, v = (_by_head(given[name], n) for name in ("query", "key", "value"))
        seen: dict[str, Any] = {
            "scale": float(q.shape[-1] ** -0.5 if scale is None else scale),
            "mask": given.get("attn_mask"),
            "causal": bool(given.get("is_causal")),
            "kernel": _kernel(**given),
            "unknown": ("dropout",) if given.get("dropout_p") else (),
        }
        changed = self._give(self._call(module, "sdpa", q=q, k=k, v=v, z=_by_head(z, n), **seen))
        return z if changed is None else changed.reshape(z.shape)

    def _multi_head(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Runs the function behind nn.MultiheadAttention, whose batch is its second axis. It would
        hand itself over to this mode as a whole; told that there is none, it runs, and its
        operators are seen one by one.
        """
        query = args[0] if args else kwargs["query"]
        seen = patch.multiple(
            self, batch=query.shape[1] if query.ndim == 3 else 1, may_lack_batch=False
        )
        with seen, patch.object(nn.functional, "has_torch_function", lambda _: False), self:
            return _MULTI_HEAD(*args, **kwargs)

    # ------------------------------------------------------------------------ attention written out

    def _is_pattern(self, value: Any) -> bool:
        """Whether a value is the waiting pattern, or a tensor made of it with the same weights."""
        return any(value is held for held in self._held)

    def _product(self, weights: Tensor, v: Tensor, z: Tensor) -> Tensor:
        """The head outputs, after the waiting pattern was captured with its values. In rows that
        became zeros all is masked.
        """
        assert self._pending is not None
        weights, v_by_head, z_by_head = (
            _by_head(tensor, self._n_sequences) for tensor in (weights, v, z)
        )
        self._pending = replace(self._pending, v=v_by_head, z=z_by_head)
        if (empty := (weights == 0).all(dim=-1, keepdim=True)).any():
            for name, fill in (("scores", -torch.inf), ("pattern", 0.0)):
                self._pending = replace(
                    self._pending, **{name: getattr(self._pending, name).masked_fill(empty, fill)}
                )
        changed = self._give_pending()
        return z if changed is None else changed.reshape(z.shape)

    def _einsum(self, args: Any, result: Tensor) -> Tensor:
        """Captures the product of the waiting pattern with the values if it is an einsum of two
        tensors, whatever the order of their axes.
        """
        equation, *tensors = args
        at = next((i for i, tensor in enumerate(tensors) if self._is_pattern(tensor)), None)
        if at is None or len(tensors) != 2 or tensors[at].ndim < 3:
            return result
        terms, _, output = equation.replace(" ", "").partition("->")
        both = terms.split(",")
        (*outer, query, key), values = both[at], both[1 - at]
        width = [letter for letter in values if letter not in both[at]]
        of_values, of_z = [*outer, key, *width], [*outer, query, *width]
        if len(width) != 1 or sorted(values) != sorted(of_values) or sorted(output) != sorted(of_z):
            return result
        z = torch.einsum(f"{output}->{''.join(of_z)}", result)
        v = torch.einsum(f"{values}->{''.join(of_values)}", tensors[1 - at])
        changed = self._product(tensors[at], v, z)
        return result if changed is z else torch.einsum(f"{''.join(of_z)}->{output}", changed)

    def _give_pending(self) -> Tensor | None:
        """Passes on a pattern that still waits for its product with the values, if there is one."""
        pending, self._pending, self._held = self._pending, None, []
        return None if pending is None else self._give(pending)

    def _count(self, first: Tensor) -> int:
        """The number of sequences of a tensor with a row for each query, whose code may merge the
        axes of sequences and heads, or leave one out.
        """
        if first.ndim != 3:
            return first.shape[:-3].numel()
        is_one = self.may_lack_batch and first.shape[1] == self.batch
        return 1 if is_one or first.shape[0] % self.batch else self.batch


def _empties_rows(pattern: Tensor, filled: Tensor) -> bool:
    """Whether weights became zeros in whole rows alone."""
    return torch.equal(filled, pattern.masked_fill((filled == 0).all(dim=-1, keepdim=True), 0.0))


def _by_head(tensor: Tensor, n: int) -> Tensor:
    """A tensor of `n` sequences with a separate axis for them, also if all of them share it."""
    if tensor.ndim == 4 and tensor.shape[0] == n:
        return tensor
    rows = tensor.reshape(-1, *tensor.shape[-2:])
    is_shared = (tensor.ndim > 3 and tensor.shape[:-3].numel() == 1) or len(rows) % n
    return rows.expand(n, -1, -1, -1) if is_shared else rows.reshape(n, -1, *rows.shape[-2:])


def _arguments(
    module: nn.Module, given: Mapping[str, Any], level: InterceptionLevel
) -> dict[str, Any]:
    """The fields of `Call` for the arguments of an attention function of transformers. `unknown`
    are those that are neither known nor None nor False.
    """
    q, k, v = (given[name] for name in _GIVEN[:3])
    mask, scaling, is_causal = (
        given.get(name) for name in ("attention_mask", "scaling", "is_causal")
    )
    is_registered = level == "registry"
    is_causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    causal = is_registered and mask is None and is_causal and q.shape[2] > 1
    sinks = given.get("s_aux") if given.get("s_aux") is not None else given.get("sinks")
    dropout = given.get("dropout") if is_registered or module.training else 0
    unknown = [
        n for n in given if n not in KNOWN and given[n] is not None and given[n] is not False
    ]
    kernel = (
        getattr(getattr(module, "config", None), "_attn_implementation", None)
        if is_registered
        else "eager"
    )
    if kernel == "sdpa":
        is_grouped = q.shape[1] != k.shape[1]
        kernel = _kernel(
            q, k, v, mask, dropout_p=dropout or 0.0, is_causal=causal, enable_gqa=is_grouped
        )
    return {
        "q": q,
        "k": k,
        "v": v,
        "scale": float(q.shape[-1] ** -0.5 if scaling is None else scaling),
        "mask": mask,
        "causal": causal,
        "softcap": given.get("softcap"),
        "bias": given.get("position_bias"),
        "sinks": sinks.squeeze(-1) if isinstance(sinks, Tensor) and sinks.ndim == 4 else sinks,
        "kernel": kernel or "eager",
        "unknown": (*sorted(unknown), *(["dropout"] if dropout else [])),
    }


def _kernel(query: Any, key: Any, value: Any, attn_mask: Any = None, **given: Any) -> str:
    """The name of the kernel that torch chooses for a call of `scaled_dot_product_attention`:
    flash, efficient, cudnn or math.
    """
    if query.device.type not in ("cpu", "cuda"):
        return "sdpa"
    chosen = torch._fused_sdp_choice(query, key, value, attn_mask, **given)
    return SDPBackend(chosen).name.removesuffix("_ATTENTION").lower()


# -------------------------------------------------------------------- what is wrapped, and put back


_LIBRARIES = ("torch.", "transformers.pytorch_utils")
"""The modules that define the layers inside an attention."""


def _writes_out(model: nn.Module) -> bool:
    """Whether an attention of the model may not use transformers' interface, and must be captured
    at torch's functions.
    """
    named = [(name, module, type(module).__module__) for name, module in model.named_modules()]
    is_of_torch = any(isinstance(module, nn.MultiheadAttention) for _, module, _ in named)
    is_foreign = any(not file.startswith(("torch.", "transformers.")) for *_, file in named)
    files = {
        file
        for name, module, file in named
        if is_attention(name, module) and not file.startswith(_LIBRARIES)
    }
    return (
        is_of_torch
        or is_foreign
        or any(not hasattr(sys.modules.get(f), "ALL_ATTENTION_FUNCTIONS") for f in files)
    )
