"""The attention inside a model or a block: which modules compute attention weights in a pass, and whether each is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from mhacli.commands.check.result import AttentionInside, CheckRequest, Examination, Finding, Verdict
from mhacli.errors import MhaError
from mhacli.usercode.inputs import copied
from mhacli.usercode.process import exception_text
from mhacli.usercode.target import naming

_WHOLE = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


class _Running(TorchFunctionMode):
    """Notes, of a model that reads `length` tokens, the innermost module with weights that computes attention weights."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.running: list[nn.Module] = []
        self.found: list[nn.Module] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function, and notes the module if these are the weights of queries over keys."""
        result = func(*args, **(kwargs or {}))
        is_pattern = func in _SOFTMAX and result.ndim > 2 and result.shape[-2:] == (self.length, self.length)
        if is_pattern or func in _WHOLE:
            self.found += [part for part in reversed(self.running) if any(True for _ in part.parameters())][:1]
        return result

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


def attention_in(module: nn.Module | None, run: Callable[[], object], length: int) -> dict[type, dict[str, nn.Module]]:
    """The modules that compute attention weights while a pass reads `length` tokens, by class and name; empty if the module
    itself does."""
    watched = _Running(length)
    with watched.watching():
        run()
    found = {id(part) for part in watched.found}
    by_class: dict[type, dict[str, nn.Module]] = {}
    for name, part in module.named_modules() if module is not None and id(module) not in found else ():
        if id(part) in found:
            by_class.setdefault(type(part), {})[name] = part
    return by_class


def compared_inside(
    parts: dict[type, dict[str, nn.Module]], request: CheckRequest, examine: Callable[[CheckRequest], Examination]
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
