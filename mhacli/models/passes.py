"""Follows the passes of a model that its user runs: their beginning and end, their inputs, and
their attentions.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from mhacli.attention.devices import has_numbers, is_autocast_on, without_autocast
from mhacli.errors import MhaError, UsageError
from mhacli.models import foreign
from mhacli.usercode.door import UserCall, calls_of_user, for_user, on_behalf, ours
from mhacli.usercode.foreign import is_transformed

from .capture import FORBIDDING, Call, Edit, Watch, captured, modes_here
from .layer_names import is_pair

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""The dtypes of ids."""
Half = Literal["encoder", "decoder"]
"""The half of an encoder-decoder; other models have only a decoder."""


class ReadIds(NamedTuple):
    """The ids of a batch with padding, and which of them are not masked. With `are_places`, the
    model was given vectors, and the ids are positions.
    """

    ids: Int[Tensor, "batch token"]
    real: Bool[Tensor, "batch token"]
    are_places: bool = False


@dataclass
class ModelPass:
    """The inputs of one call of a model: the number of sequences, and the ids that the running part
    of the model reads, of each half that has any: None if it may read several.

    `used` are the ids of the first attention of each half. `n_past` tokens are already in a cache.
    `is_cached` says that the pass reads or creates a cache, which is `cache` if it tells its length
    by that of the layer `first_layer`.
    """

    batch: int
    halves: dict[Half, ReadIds | None] = field(default_factory=dict)
    used: dict[Half, ReadIds | None] = field(default_factory=dict)
    n_past: int = 0
    is_cached: bool = False
    cache: Any = None
    first_layer: int = 0

    @property
    def n_cached(self) -> int:
        """The number of tokens in the cache now."""
        return 0 if self.cache is None else int(self.cache.get_seq_length(self.first_layer))


@dataclass
class _Reader:
    """A running part of a model, with the ids that it reads, the number of their sequences, and the
    tables of ids that embeddings looked up meanwhile.
    """

    module: nn.Module
    halves: dict[Half, ReadIds | None]
    batch: int
    tables: list[tuple[nn.Module, Tensor]] = field(default_factory=list)

    def look_up(self, embedding: nn.Module, ids: Tensor) -> None:
        """Reads the ids that an embedding looks up. A second text means that those of an attention
        are unknown; positions and types of tokens are no text.
        """
        read = self.halves.get("decoder")
        if read is not None and read.ids.shape != ids.shape:
            return
        is_known = read is not None and torch.equal(read.ids, ids)
        is_text = is_known or not _counts_up(ids) or any(embedding is e for e, _ in self.tables)
        if not is_text:
            return
        if not any(torch.equal(ids, table) for _, table in self.tables):
            self.tables.append((embedding, ids))
        if read is not None and not is_known:
            self.halves["decoder"] = None if len(self.tables) > 1 else read._replace(ids=ids)


@contextmanager
def followed(
    model: nn.Module, listener: Any, *, by: str, edits: bool = False, threads: bool = True
) -> Iterator[Watch]:
    """A context in which a listener receives every pass of `model`, of one thread at a time and
    without recomputations in a backward pass.

    Its methods are `begin(ModelPass)`, where the inputs of a part of the model become known when
    the part runs; `take(call)` with each attention; `end(is_whole=)`, False if the model raised an
    exception; `stray(name)` for an attention outside any pass; and `skip()` for a call while
    another thread is within the model. Its `refused` becomes the error of a call that cannot be
    followed. Calls are detached from the graph, with gradients and autocast off, and their tensors
    belong to the model. A listener that `edits` gets them unchanged, and may return an `Edit`.

    `by` is the function that the user called. Raises `MhaError` in a pass of another thread without
    `threads`, and when editing in a backward pass or in two threads at once.
    """
    passes = _Passes(model, listener, by, edits, threads)
    with (
        captured(
            model, passes.take, edits=edits, heads="apart" if edits else "joined"
        ) as passes.watch,  # waits for the captures of other threads
        calls_of_user() as passes.calls,
        ExitStack() as hooks,
    ):
        has_names = hasattr(model, "config") or is_pair(model)
        for name, part in model.named_modules():
            enter, leave = (
                _function(passes.watch, passes.enter),
                _function(passes.watch, passes.leave),
            )
            if name and not (hasattr(part, "main_input_name") or "input_ids" in _parameters(part)):
                if has_names or not (isinstance(part, nn.Embedding) or any(part.children())):
                    continue
                enter = _function(passes.watch, passes.enter_unnamed)
            else:
                passes.watch.beginning.add(id(part))
            hooks.callback(part.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
        hooks.callback(passes.close)
        yield passes.watch


def _function(watch: Watch, method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method while a watch is open: a copy of a model shares the functions
    of its hooks, but copies the objects of methods along.
    """
    return lambda *seen: None if watch.is_closed else method(*seen)


class _Passes:
    """Separates passes by the outermost running module, and follows one thread at a time."""

    watch: Watch
    calls: UserCall

    def __init__(
        self, model: nn.Module, listener: Any, by: str, edits: bool, threads: bool
    ) -> None:
        self._model, self._listener, self._by, self._edits = model, listener, by, edits
        self._name = type(model).__name__
        self._takes_threads, self._owner = threads, threading.get_ident()
        self._lock = threading.Lock()  # of the thread that is within the model
        self._modes = ExitStack()
        self._unseen = WeakSet[Any]()  # the caches of calls that were not followed
        self._is_pair = is_pair(model)
        is_of_transformers = hasattr(model, "main_input_name")
        # a part of a model may begin with a later layer
        self._first_layer = 0 if is_of_transformers else foreign.first_layer_idx(model) or 0
        self._running: list[_Reader] = []
        self._pass = ModelPass(1)
        self._known: dict[object, ReadIds] = {}  # by the tensors that a module of the pass is given

    def enter(self, module: nn.Module, args: Any, keywords: Mapping[str, Any]) -> None:
        """The hook before a module that users may call."""
        if id(module) in self.watch.names and torch.compiler.is_compiling():
            raise MhaError(
                f"{self._name} is called through torch.compile, whose kernels hide its attention",
                hint=f"call the module itself within {self._by}",
                code="hidden",
            )
        self._enter(module, args, keywords)

    @ours()
    def enter_unnamed(self, module: nn.Module, args: Any, keywords: Mapping[str, Any]) -> None:
        """The hook before a part that may read ids under any name: its first tensor."""
        first = next((v for v in (*args, *keywords.values()) if isinstance(v, Tensor)), None)
        if first is None or not (self._running and self._is_within) or not _is_table(first):
            return
        if not isinstance(module, nn.Embedding):
            self._enter(module, args, keywords)
        elif not (foreign.is_in_backward() or is_transformed(first)):
            known = self._known.get((foreign.state_of(first), None))
            ids = (first.cpu() if known is None else known.ids).clone()
            for part in self._running:
                part.look_up(module, ids)

    @ours()
    def _enter(self, module: nn.Module, args: Any, keywords: Mapping[str, Any]) -> None:
        """Begins a run of such a module; a copy of the model is another one."""
        if id(module) not in self.watch.names or foreign.is_in_backward():
            return
        if self._is_within and any(part.module is module for part in self._running):
            self.interrupt()  # an interrupted pass calls no hook
        if not self._claim(module, keywords.get("past_key_values")):
            return
        arguments = _named_arguments(module, args, keywords)
        self._require_readable(arguments.values())
        is_first = not self._running
        if is_first:
            self._begin(module, args, arguments)
        around = {} if is_first else self._pass.halves
        self._running.append(_Reader(module, dict(around), self.watch.batch))
        self._pass.halves = self._running[-1].halves
        self._read(self.watch.names[id(module)], arguments, is_first=is_first)
        self.watch.batch = self._running[-1].batch
        if is_first:
            self._listener.begin(self._pass)

    @property
    def _is_within(self) -> bool:
        """Whether this thread is within the model, with calls that are followed."""
        return self.watch.thread == threading.get_ident()

    def _claim(self, module: nn.Module, cache: Any) -> bool:
        """Claims the model for this thread, if no other one is within it, and if every call was
        followed that filled the cache. Returns whether this thread is within the model.
        """
        here = threading.get_ident()
        if self._is_within:
            return True
        if self.watch.skipped.get(here, module) is not module:
            return False
        may_follow = self._takes_threads or here == self._owner
        if may_follow and cache not in self._unseen and self._lock.acquire(blocking=False):
            self.watch.skipped.pop(here, None)
            self.watch.thread = here
            if here != self._owner:
                self._modes = modes_here()
            return True
        self.watch.skipped[here] = module
        if not may_follow:
            raise for_user(
                self._refused(
                    (
                        f"{self._name} is called in a different thread from the one that opened"
                        f" {self._by}"
                    ),
                    hint=f"open {self._by} in the thread that calls the model",
                    code="other-thread",
                )
            )
        if self._edits:
            raise for_user(self._two_threads())
        self._listener.skip()
        return False

    def _two_threads(self) -> MhaError:
        return self._refused(
            f"{self._name} runs in another thread, and {self._by} follows one at a time",
            hint="let each call end before the next, and before the context ends",
            code="other-thread",
        )

    def _refused(self, message: str, *, hint: str, code: str) -> MhaError:
        """The error of a call that cannot be followed. The listener keeps it, because what a thread
        raises may be lost.
        """
        fault = self._listener.refused = MhaError(message, hint=hint, code=code)
        return fault

    def _begin(self, module: nn.Module, args: Any, arguments: Mapping[str, Any]) -> None:
        """Begins a pass with the module that is called."""
        first = _tensor(arguments, at=0)
        self._pass = ModelPass(
            1 if first is None else first.shape[0], first_layer=self._first_layer
        )
        # rows of numbers, or ids in a row, may be the tokens of a single sequence
        n_axes_of_ids = 2 if first is None else first.ndim - first.is_floating_point()
        self.watch.may_lack_batch = n_axes_of_ids <= 1
        self._known = {}
        self.watch.batch = self._pass.batch
        self.watch.begin_pass()
        self.watch.enter(module, args)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook after such a module, also if it raised. After the outermost, it raises the first
        fault of mha in the pass.
        """
        here = threading.get_ident()
        if self.watch.skipped.get(here) is module:
            del self.watch.skipped[here]
            cache = getattr(output, "past_key_values", None)
            if hasattr(cache, "get_seq_length"):
                self._unseen.add(cache)
        if not self._is_within:
            return
        self._leave(module, output)
        is_outermost = not self._running or self._running[0].module is module
        if is_outermost and self.calls.fault is not None and _is_whole(output):
            self.interrupt()
            self.calls.end()
        if not self._running and self.calls.fault is None:
            self._release()

    @ours()
    def _leave(self, module: nn.Module, output: Any) -> None:
        """Ends a run of such a module."""
        if not self._running or self._running[-1].module is not module:
            return
        left = self._running.pop().halves
        if not self._running:
            made = getattr(output, "past_key_values", None)
            if self._pass.is_cached and hasattr(made, "get_seq_length"):
                self._pass.cache = made
            self._listener.end(is_whole=_is_whole(output))
            return
        around = self._running[-1]
        around.halves |= left | around.halves  # what it reads itself goes before
        self._pass.halves, self.watch.batch = around.halves, around.batch

    def interrupt(self) -> None:
        """Ends a pass that was interrupted."""
        if self._running:
            self._running.clear()
            self._listener.end(is_whole=False)
        self._release()

    def _release(self) -> None:
        """Lets other threads into the model."""
        if self._is_within:
            self._modes.close()
        if self._lock.locked():
            self.watch.thread = None
            self._lock.release()

    def close(self) -> None:
        """Ends a pass that was interrupted. Raises `MhaError` if edits of a call in another thread
        end before it.
        """
        self.watch.is_closed = True
        is_elsewhere = self.watch.thread not in (None, self._owner)
        self.interrupt()
        if is_elsewhere and self._edits:
            raise self._two_threads()

    def _read(self, name: str, arguments: Mapping[str, Any], *, is_first: bool) -> None:
        """Reads the ids, or vectors, and the state of the cache from the arguments of a module."""
        cache: Any = arguments.get("past_key_values")
        self._pass.is_cached |= cache is not None or arguments.get("use_cache") is True
        if hasattr(cache, "get_seq_length"):
            self._pass.cache = cache
            self._pass.n_past = max(self._pass.n_past, self._pass.n_cached)
        half: Half = "encoder" if self._is_pair and "decoder" not in name.split(".") else "decoder"
        self._read_half(half, "", arguments, is_first=is_first, takes_tensor=True)
        takes_tensor = half == "encoder"  # otherwise the first tensor is the decoder's
        self._read_half(
            "decoder", "decoder_", arguments, is_first=is_first, takes_tensor=takes_tensor
        )

    def _read_half(
        self,
        half: Half,
        prefix: str,
        arguments: Mapping[str, Any],
        *,
        is_first: bool,
        takes_tensor: bool,
    ) -> None:
        """Reads the ids, or vectors, that the arguments of a module name with a prefix. A module
        without a config may take the ids of a half as a tensor under any name.
        """
        ids: Any = arguments.get(f"{prefix}input_ids")
        vectors = arguments.get(f"{prefix}inputs_embeds")
        if ids is None and takes_tensor and not hasattr(self._model, "config"):
            ids = _tensor(arguments, at=1 if prefix else 0)
        has_ids = isinstance(ids, Tensor) and _is_table(ids)
        around = self._pass.halves.get(half)
        if not has_ids:
            if not (isinstance(vectors, Tensor) and vectors.ndim == 3 and is_first):
                return
            ids = torch.arange(vectors.shape[1]).expand(vectors.shape[:2])
        mask: Any = arguments.get(f"{prefix}attention_mask")
        if isinstance(mask, Mapping):
            mask = next(iter(mask.values()), None)  # one mask per kind of layer
        key = tuple(map(foreign.state_of, (ids, mask)))
        if key not in self._known:
            real = _shown(mask, ids, self._pass.n_past)
            self._known[key] = ReadIds(*_on_cpu(ids, real), are_places=not has_ids)
        read = self._known[key]
        if around is None or not torch.equal(around.ids, read.ids):
            if not is_first:
                self._running[-1].batch = len(read.ids)
            self._pass.halves[half] = read
        elif around.real.all() and not read.real.all():  # the part alone is given the mask
            masked = around._replace(real=read.real)
            for part in self._running:
                if part.halves.get(half) is around:
                    part.halves[half] = masked

    def _require_readable(self, values: Iterable[Any]) -> None:
        """Raises `MhaError` for tensors without data, with rows of different lengths, or with
        several tensors inside.
        """
        tensors = [value for value in values if isinstance(value, Tensor)]
        is_open = [
            has_numbers(t.device) and not (t.is_nested or is_transformed(t)) for t in tensors
        ]
        if not all(is_open):
            raise self._refused(
                (
                    f"{self._name} is called with tensors whose numbers cannot be read: on the"
                    " device meta, nested, or in a transform of torch.func"
                ),
                hint=f"call it with ordinary tensors within {self._by}",
                code="hidden",
            )

    def take(self, call: Call) -> Edit | None:
        """Hands an attention of the model on."""
        if foreign.is_in_backward():
            if self._edits:
                raise for_user(
                    MhaError(
                        (
                            f"{self._by} does not work with activation checkpointing: a backward"
                            f" pass computes {call.name} again"
                        ),
                        hint="switch activation checkpointing off",
                        code="backward",
                    )
                )
            return None
        if self.watch.is_closed:
            return None
        if not (self._running and self._is_within):
            on_behalf(self._listener.stray, call.name)  # no end of a pass would raise it
            return None
        if self._edits:
            edited: Edit | None = self._listener.take(call)
            return edited
        self._require_readable(call.tensors.values())
        with torch.no_grad():
            detached = _detached(call, is_autocast=is_autocast_on(call.device))
            with without_autocast(call.device):
                self._listener.take(detached)
        return None


def _detached(call: Call, *, is_autocast: bool) -> Call:
    """A call outside of the graph of gradients, with queries, keys and values as the operator that
    reads them rounds them under autocast.
    """
    tensors: dict[str, Any] = {
        name: tensor.detach() for name, tensor in call.tensors.items() if tensor.requires_grad
    }
    if is_autocast and call.q is not None and call.z is not None and call.q.dtype != call.z.dtype:
        for name, tensor in zip("qkv", call.qkv, strict=True):
            tensors[name] = tensor.detach().to(call.z.dtype)
    return replace(call, **tensors)


def _is_whole(output: Any) -> bool:
    """Whether a module that gave an output, in a hook behind it, did not raise."""
    return output is not None or sys.exception() is None


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _named_arguments(module: nn.Module, args: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, ids or vectors first, then in the order of the signature;
    unnamed ones by number.
    """
    names = [
        name
        for name, item in _parameters(module).items()
        if item.kind is item.POSITIONAL_OR_KEYWORD
    ]
    more = {str(i): value for i, value in enumerate(args[len(names) :])}
    arguments = dict(zip(names, args, strict=False)) | more | dict(keywords)
    batches = [value for value in arguments.values() if _names_ids(value)]
    if len(batches) == 1:  # as the output of a tokenizer
        arguments |= batches[0]
    return {
        name: arguments[name]
        for name in ("input_ids", "inputs_embeds", *names, *arguments)
        if name in arguments
    }


def _names_ids(value: Any) -> bool:
    return isinstance(value, Mapping) and "input_ids" in value


def _is_table(tensor: Tensor) -> bool:
    """Whether a tensor has the form of the ids of a batch."""
    return tensor.ndim == 2 and tensor.numel() > 0 and tensor.dtype in _WHOLE


def _counts_up(ids: Tensor) -> bool:
    """Whether rows begin near 0 and never rise by more than 1, as positions and types do."""
    steps = ids.diff(dim=1)
    return bool(((steps >= 0) & (steps <= 1)).all() and (ids[:, 0] <= 2).all())


def _tensor(arguments: Mapping[str, Any], at: int) -> Tensor | None:
    """Tensor number `at` of a call."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor) and value.ndim]
    return tensors[at] if at < len(tensors) else None


def _shown(mask: Any, ids: Tensor, n_past: int) -> Tensor:
    """The tokens that are not padding, by a mask of tokens, or by one of queries and keys, where
    keys without any query are padding on the left. Without such a mask all are.
    """
    batch, n = ids.shape[:2]
    real = torch.ones(batch, n, dtype=torch.bool)
    if not isinstance(mask, Tensor) or not mask.ndim or mask.shape[0] != batch:
        return real
    if mask.ndim == 2 and mask.shape[1] >= n:
        real = (mask != 0)[:, -n:]
    elif mask.ndim == 4 and mask.shape[2] == n and mask.shape[3] >= n_past + n:
        cells = mask if mask.dtype == torch.bool else mask > FORBIDDING
        seen = cells[..., n_past : n_past + n].flatten(1, 2).any(dim=1)
        real = seen.cumsum(dim=1) > 0
    return real


def _on_cpu(
    ids: Int[Tensor, "batch token"], real: Bool[Tensor, "batch token"]
) -> tuple[Tensor, Tensor]:
    """Both on the CPU, for which a device that holds both is waited for once."""
    if ids.device != real.device:
        return ids.cpu(), real.cpu()
    ids, real = torch.stack([ids, real.to(ids.dtype)]).cpu()
    return ids, real != 0


# ---------------------------------------------------------------------------------- what is refused


class _Hidden(NamedTuple):
    """Why computations cannot be followed, and what helps."""

    why: str
    remedy: str


_HIDING = {
    "OptimizedModule": _Hidden(
        "compiled, and its attention runs within kernels",
        "use its _orig_mod, the module before it was compiled",
    ),
    "ScriptModule": _Hidden(
        "scripted: torch.jit runs it without Python",
        "give {by} the module that it was made of",
    ),
    "DataParallel": _Hidden(
        "run in copies, each in a thread of its own",
        "give {by} model.module, and call it",
    ),
}
"""Classes that hide the computations of their parts."""
_COMPILED = _Hidden(
    "compiled, and its attention runs within kernels",
    "give {by} a copy on which compile() was not called",
)
_FAST = _Hidden(
    "in evaluation, where a fast path of torch leaves it out",
    "torch.backends.mha.set_fastpath_enabled(False)",
)


def require_open(model: nn.Module, by: str) -> None:
    """Raises `UsageError` for an object that is no module, and `MhaError` for a module whose parts
    cannot be followed.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{by} needs one torch.nn.Module, not a {type(model).__name__}",
            hint="AutoModel.from_pretrained of transformers loads a checkpoint"
            if isinstance(model, str)
            else None,
        )
    modules = dict(model.named_modules())
    for name, module in modules.items():
        reason = _hidden_by(module, around=modules[name.rpartition(".")[0]])
        if reason is not None:
            what = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise MhaError(
                f"{what} cannot be inspected: it is {reason.why}",
                hint=reason.remedy.format(by=by),
                code="hidden",
            )


def _hidden_by(module: nn.Module, around: nn.Module) -> _Hidden | None:
    """The reason why the computations of a module cannot be followed, None if they can."""
    for kind in type(module).__mro__:
        if kind.__name__ in _HIDING:
            return _HIDING[kind.__name__]
    if foreign.is_compiled(module):
        return _COMPILED
    has_fast_path = isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer)
    if not has_fast_path or module.training or not torch.backends.mha.get_fastpath_enabled():
        return None
    # in models of transformers no text attends to itself in this way
    return None if type(around).__module__.startswith("transformers.") else _FAST
