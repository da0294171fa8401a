"""Imports, builds and prepares user code for `mha check` and `mha trace FILE.py:NAME`."""

from __future__ import annotations

from dataclasses import replace

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
    return replace(built, stage=stage)


def arguments_of(built: Built) -> tuple[Argument, ...]:
    """The arguments with which the code was built, and the origin of each."""
    arguments = []
    for name, value in built.arguments.items():
        if any(other.startswith(f"{name}.") for other in built.arguments):
            continue  # a config, whose fields are listed one by one
        origin = "guessed" if name in built.guesses else "given" if name in built.given else "default"
        arguments.append(Argument(name, f"{value!r:.80}", origin, built.guesses.get(name, "")))  # type: ignore[arg-type]
    return tuple(arguments)
