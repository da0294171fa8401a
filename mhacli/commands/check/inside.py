"""The attention inside a model or a block: which modules compute attention weights in a pass, whether any hides later tokens, and
whether each is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from mhacli.commands.check.result import AttentionInside, CheckRequest, Examination, Finding, Verdict
from mhacli.errors import MhaError
from mhacli.usercode.build import copied
from mhacli.usercode.process import exception_text
from mhacli.usercode.target import naming

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Those of `scaled_dot_product_attention` in order; torch's modules call the other function with its masks by name."""
_WHOLE = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_HIDDEN = -1e3
"""Terms added to scores below this number hide a key."""
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


class _Running(TorchFunctionMode):
    """Notes, of a model that attends over `length` tokens, None for an unknown number, the innermost module with weights that
    computes attention weights, and whether any weights of these tokens over themselves are zero for all later tokens."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.length = length
        self.running: list[nn.Module] = []
        self.found: list[nn.Module] = []
        self.is_causal = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, and notes the module if these are the weights of queries over keys."""
        result = func(*args, **(kwargs or {}))
        is_pattern = func in _SOFTMAX and result.ndim > 2 and self._is_of_all(result)
        if is_pattern or func in _WHOLE:
            self.found += [part for part in reversed(self.running) if any(True for _ in part.parameters())][:1]
            by_place = args if func is F.scaled_dot_product_attention else ()
            named = {**dict(zip(_ARGUMENTS, by_place, strict=False)), **(kwargs or {})}
            mask = result if is_pattern else named.get("attn_mask")
            self.is_causal |= named.get("is_causal") is True or self._hides_later(mask, is_pattern=is_pattern)
        return result

    def _is_of_all(self, pattern: Tensor) -> bool:
        """Whether a mask or a pattern has a row and a column for each token."""
        n_queries, n_keys = pattern.shape[-2:]
        return n_queries == n_keys == (self.length or n_keys) > 1

    def _hides_later(self, mask: Tensor | None, *, is_pattern: bool) -> bool:
        """Whether a mask, or a pattern, hides all later keys from each query."""
        if mask is None or not self._is_of_all(mask):
            return False
        later = mask[..., torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)]
        if is_pattern:
            return not bool(later.any())
        if mask.dtype == torch.bool:  # torch's functions and modules differ in what True means
            return bool((later != mask[..., :1, 0]).all())
        return bool((later < _HIDDEN).all())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows which module runs, inside the context."""

        def leave(*_: object) -> None:
            self.running.pop()

        begin = register_module_forward_pre_hook(lambda part, _: self.running.append(part))
        end = register_module_forward_hook(leave, always_call=True)
        try:
            with self:
                yield
        finally:
            begin.remove()
            end.remove()


class AttentionFound(NamedTuple):
    """The modules that compute attention weights in a pass, by class and name, and whether any hides all later tokens."""

    modules: Mapping[type, Mapping[str, nn.Module]]
    is_causal: bool


def attention_in(module: nn.Module | None, run: Callable[[], object], length: int | None) -> AttentionFound:
    """The attention in a pass that reads `length` tokens; without modules if the module itself computes it."""
    watched = _Running(length)
    with watched.watching():
        run()
    found = {id(part) for part in watched.found}
    by_class: dict[type, dict[str, nn.Module]] = {}
    for name, part in module.named_modules() if module is not None and id(module) not in found else ():
        if id(part) in found:
            by_class.setdefault(type(part), {})[name] = part
    return AttentionFound(by_class, watched.is_causal)


def compared_inside(
    parts: Mapping[type, Mapping[str, nn.Module]], request: CheckRequest, examine: Callable[[CheckRequest], Examination]
) -> tuple[tuple[AttentionInside, ...], list[Finding]]:
    """The comparison of each class of attention inside a model with the reference, by `examine`, and the mistakes found."""
    inside, mistakes = list[AttentionInside](), list[Finding]()
    for cls, named in parts.items():
        verdict: Verdict = "unknown"
        try:
            with naming(copied(next(iter(named.values())))) as target:
                compared = examine(replace(request, target=target, arg=(), call_arg=(), example=None, causal=False))
            verdict, reason = compared.verdict, compared.reason or ""
            mistakes += compared.findings
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as fault:  # user code may raise anything
            reason = fault.message if isinstance(fault, MhaError) else exception_text(fault)
        inside.append(AttentionInside(cls.__name__, tuple(named), verdict, reason))
    return tuple(inside), mistakes
