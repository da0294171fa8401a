"""What `mha trace` does with somebody's own attention: whether a word names one, the request, and the walk in its own process."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict, fields, replace
from os.path import isdir, isfile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhacli.cli.options import DeviceOptions, LayerOptions, SourceOptions, number, option_group
from mhacli.cli.shared.text_arguments import are_literal
from mhacli.cli.streams import life
from mhacli.cli.values import pairs, real
from mhacli.errors import UsageError

if TYPE_CHECKING:
    from mhacli.requests.user_code import TargetRequest
    from mhacli.results.record.record import Record

_OWN = "Your own attention"
_NAME = re.compile(r"[^\s:]+:[^\W\d][\w.]*")
_JOB = "mhacli.compute.user_trace.trace:walk_request"


@option_group
class OwnOptions:
    """How somebody's own attention is built and called, where TEXT names one."""

    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="An argument of the constructor, where TEXT is FILE.py:CLASS or package.module:CLASS.",
            rich_help_panel=_OWN,
        ),
    ] = None
    call_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--call-arg", metavar="NAME=VALUE", help="An argument that each call is given.", rich_help_panel=_OWN
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        number(_OWN, real("time-limit"), "Seconds that one call may take. (default: 5)", metavar="SECONDS"),
    ] = None


def target_in(source: SourceOptions, own: OwnOptions) -> str | None:
    """The target that the first word names, None where the words are texts. Raises `UsageError` for options that need a target,
    for a word beside one, and for a Python file alone, whose classes it lists."""
    words = [] if are_literal() else source.typed or []
    if len(words) == 1 and words[0].endswith(".py") and isfile(words[0]):
        from mhacli.adapters.usercode.target import split_target

        split_target(words[0])
    given = {"--arg": own.arg, "--call-arg": own.call_arg, "--time-limit": own.time_limit}
    asked = next((option for option, value in given.items() if value is not None), None)
    if words and (names_target(words[0]) or (asked is not None and _NAME.fullmatch(words[0]))):
        if len(words) > 1:
            hint = "a text of that form can stand behind another text, not before"
            raise UsageError(f"target must stand alone, got {words[1][:80]!r} besides", hint=hint)
        return words[0]
    if asked is not None:
        raise UsageError(
            f"{asked} must come with a target, FILE.py:NAME or package.module:NAME, got none",
            hint="try mha trace my.py:Attention --arg d_model=64",
        )
    return None


def names_target(word: str) -> bool:
    """Whether a word is meant as `FILE.py:NAME` or `package.module:NAME`, and not as a text.

    It has no blanks, unless it begins with the name of a file that is there; behind the colon stands a name; a module without a
    dot has to be found.

    >>> [names_target(word) for word in ("my.py:Attention", "torch.nn:Linear", "Re:Zero", "12:30", "so it is: good")]
    [True, True, False, False, False]
    """
    place, _, name = word.rpartition(":")
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if place.endswith(".py"):
        return not any(character.isspace() for character in word) or isfile(place)
    parts = place.split(".")
    return all(part.isidentifier() for part in parts) and (len(parts) > 1 or _is_found(place))


def _is_found(module: str) -> bool:
    """Whether there is a module of that name, here or installed. Nothing is imported."""
    return isfile(f"{module}.py") or isdir(module) or importlib.util.find_spec(module) is not None


def require_of_target(*groups: tuple[object, tuple[str, ...]]) -> None:
    """Raises `UsageError` for options of texts and of our own layer. Each group comes with its fields that a target takes."""
    for group, taken in groups:
        for field in fields(group):  # type: ignore[arg-type]
            if field.name not in taken and getattr(group, field.name) != field.default:
                raise UsageError(
                    f"--{field.name.replace('_', '-')} must be left out with a target, which is walked as its own code has it",
                    hint="--arg NAME=VALUE is given to its constructor, --call-arg NAME=VALUE to its call",
                )


def walk_target(target: str, own: OwnOptions, *, layer: LayerOptions, device: DeviceOptions, values: bool) -> Record:
    """The record of the walk, made in a process of its own. Raises `MhaError` for what cannot be imported, built or called."""
    from mhacli.adapters.usercode.process import run_in_child
    from mhacli.adapters.usercode.target import require_readable
    from mhacli.cli.shared.request import record_command
    from mhacli.io.json_schema import decode, load_json
    from mhacli.requests.user_code import DEFAULT_TIME_LIMIT_S
    from mhacli.results.record.record import Record

    require_readable(target)
    of = _request(target, own, layer=layer, device=device)
    asked: dict[str, Any] = {"of": asdict(of), "values": values, "command": list(record_command())}
    limit_s = DEFAULT_TIME_LIMIT_S if own.time_limit is None else own.time_limit
    with life(f"walking {target}"):
        outcome = run_in_child(_JOB, asked, time_limit_s=limit_s)
    record = decode(Record, load_json(outcome.result, target), target)
    module = record.module
    return replace(record, module=None if module is None else replace(module, printed=outcome.printed))


def _request(target: str, own: OwnOptions, *, layer: LayerOptions, device: DeviceOptions) -> TargetRequest:
    from mhacli.requests.user_code import TargetRequest

    return TargetRequest(
        target=target,
        arguments=pairs(own.arg, "arg"),
        call_arguments=pairs(own.call_arg, "call-arg"),
        causal=bool(layer.causal),
        device=_device(device.device),
        seed=layer.seed or 0,
    )


def _device(name: str | None) -> str:
    return "cpu" if name in (None, "auto") else str(name)
