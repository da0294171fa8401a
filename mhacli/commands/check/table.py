"""The targets of `mha check` that a pyproject.toml states, and what each is meant to do.

[[tool.mha.check.targets]]
target = "my_gpt.py:GPT"
causal = true
arg = { vocab_size = 65 }
accept = { "padding-leak@decoder" = "texts are never padded" }
"""

import os
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from mhacli.cli.parameters import require_fitting
from mhacli.errors import UsageError
from mhacli.io.files import read_whole
from mhacli.settings import options_of, require_ranges
from mhacli.usercode.target import split_target

from .result import CheckRequest
from .run import accept_words, argument_words

_OPTIONS = dict(options_of(CheckRequest))
_FIELDS = {
    "target" if option.argument else option.name(field).removeprefix("--"): field
    for field, option in _OPTIONS.items()
}
"""By key of a target its field: the keys are the names of the options."""
_MOST_BYTES = 1 << 24
_TARGETS = tuple[str | dict[str, Any], ...]


def nearest_table(folder: Path) -> Path | None:
    """The nearest pyproject.toml that states targets, from an absolute folder upward; None without
    one. Raises `UsageError` for one on the way that is no TOML.
    """
    paths = (each / "pyproject.toml" for each in (folder, *folder.parents))
    return next((path for path in paths if os.path.isfile(path) and _table(path) is not None), None)


def requests_of(path: Path) -> tuple[CheckRequest, ...]:
    """The request of each target that a pyproject.toml states, relative to its folder. Raises
    `UsageError` with the place, for an unknown key with the nearest one.
    """
    table = _table(path)
    place = f"{path}"
    requests = list[CheckRequest]()
    try:
        if table is None:
            raise UsageError("there is no table [tool.mha.check]")
        _require_known(msgspec.convert(table, dict[str, Any]), ("targets",))
        targets = msgspec.convert(table.get("targets", ()), _TARGETS)
        if not targets:
            raise UsageError("[tool.mha.check] has no targets")
        for number, each in enumerate(targets, 1):
            place = f"{path}, target {number}"
            stated = {"target": each} if isinstance(each, str) else each
            requests.append(request_of(stated, os.path.abspath(path.parent)))
    except (UsageError, msgspec.ValidationError) as fault:
        message = fault.typed_message if isinstance(fault, UsageError) else str(fault)
        hint = fault.typed_hint if isinstance(fault, UsageError) else None
        raise UsageError(f"{place}: {message}", hint=hint, path=str(path)) from None
    return tuple(requests)


def _table(path: Path) -> Any:
    """The table `[tool.mha.check]`; None without one."""
    import tomllib  # not for a help text

    try:
        table: Any = tomllib.loads(read_whole(str(path), _MOST_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"{path} is not TOML: {fault}", path=str(path)) from None
    for name in ("tool", "mha", "check"):
        table = table.get(name) if isinstance(table, dict) else None
    return table


def _require_known(keys: Iterable[str], known: Collection[str]) -> None:
    """Raises `UsageError` for a key that is not known, with the nearest one."""
    for key in keys:
        if key not in known:
            (nearest,) = get_close_matches(key, known, n=1, cutoff=0)
            hint = f"the nearest is {nearest}"
            if key in _FIELDS and not nearest.startswith(key):  # such as `target`
                hint = f"{key} is a key of each target, in [[tool.mha.check.targets]]"
            raise UsageError(f"there is no key {key[:80]!r}", hint=hint)


def request_of(stated: Mapping[str, Any], folder: str) -> CheckRequest:
    """The request of a target, relative to a folder. Raises `UsageError`."""
    _require_known(stated, _FIELDS)
    given = dict[str, Any]()
    for key, value in stated.items():
        option = _OPTIONS[_FIELDS[key]]
        if value is False and f"no-{key}" in _FIELDS:
            key = f"no-{key}"
            value = True
        elif isinstance(value, dict) and option.many:
            value = (accept_words if key == "accept" else argument_words)(value)
        elif isinstance(value, list):
            value = tuple(value)
        elif option.parse is not None and isinstance(value, str):
            try:
                option.parse(value)
            except ValueError as fault:
                raise UsageError(f"{key} {fault}") from None
        if value is not False or getattr(CheckRequest, _FIELDS[key]) is not False:
            given[_FIELDS[key]] = value
    request = CheckRequest(**given, folder=folder)
    require_ranges(request)
    require_fitting(given, _OPTIONS, None)
    for target in request.targets:
        split_target(target.target)
    _ = request.condition, request.acceptances  # which raise where they cannot be read
    return request
