"""Imports, builds and prepares user code for `mha check` and `mha trace FILE.py:NAME`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from mhacli.record.record import Argument
from mhacli.usercode.build import build
from mhacli.usercode.call.find_call import find_user_attention
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.process import Stage
from mhacli.usercode.target import TargetRequest, find_target
from mhacli.usercode.types import Built


def load_user_attention(request: TargetRequest, stage: Stage) -> UserAttention:
    """The requested attention, built and ready to be called."""
    return find_user_attention(load_built(request, stage), request)


def load_built(request: TargetRequest, stage: Stage) -> Built:
    """The requested code, built, before it is known how to call it."""
    stage(f"importing {request.target}")
    thing = find_target(request.target)
    stage(f"building {request.target}")
    built = build(thing, request)
    stage(f"finding out how to call {request.target}")
    return limited(built, stage)


def limited(built: Built, stage: Stage) -> Built:
    """The same code, which reports the begin and end of each call, so that only calls have a time limit."""

    def begin(*_: object) -> None:
        stage(f"calling {built.name}")

    def end(*_: object) -> None:
        stage(f"examining {built.name}", limited=False)

    if built.module is not None:
        built.module.register_forward_pre_hook(begin)
        built.module.register_forward_hook(end, always_call=True)
        return built

    @functools.wraps(built.call)
    def call(*inputs: Any, **keywords: Any) -> Any:
        begin()
        try:
            return built.call(*inputs, **keywords)
        finally:
            end()

    return replace(built, call=call)


def arguments_of(built: Built) -> tuple[Argument, ...]:
    """The arguments with which the code was built, and the origin of each."""
    arguments = []
    for name, value in built.arguments.items():
        if any(other.startswith(f"{name}.") for other in built.arguments):
            continue  # a config, whose fields are listed one by one
        origin = "guessed" if name in built.guesses else "given" if name in built.given else "default"
        arguments.append(Argument(name, f"{value!r:.80}", origin, built.guesses.get(name, "")))  # type: ignore[arg-type]
    return tuple(arguments)
