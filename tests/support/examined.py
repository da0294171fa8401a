"""Cases of the zoo, examined in this process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import unittest.mock
import warnings
from pathlib import Path

from mhacli.cli.values import pairs
from mhacli.compute.check.examine import examine
from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import Examination
from support.attention_zoo import Case


def no_stage(what: str, *, limited: bool = True) -> None:
    """Nobody waits."""


def request_of(case: Case, target: str = "") -> CheckRequest:
    """What `mha check` asks of a case."""
    words = case.options.split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    call = pairs([options["--call-arg"]] if "--call-arg" in options else [], "call-arg")
    of = TargetRequest(target or case.target, pairs(case.arguments.split(), "arg"), call, case.causal)
    return CheckRequest(
        of,
        mask_means=options.get("--mask-means"),  # type: ignore[arg-type]
        rope=options.get("--rope"),  # type: ignore[arg-type]
        scale=float(options["--scale"]) if "--scale" in options else None,
        n_heads=int(options["--heads"]) if "--heads" in options else None,
    )


@functools.cache
def examined(case: Case, target: str = "") -> Examination:
    """The examination of a case, or of its name in another file."""
    return examination_of(request_of(case, target))


def examination_of(request: CheckRequest) -> Examination:
    """The examination that is asked for; what their code prints is not shown."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), every_probe(), remembered_classes():
        warnings.simplefilter("ignore")  # torch warns of what some of them do
        return examine(request, no_stage)


def every_probe() -> contextlib.AbstractContextManager[object]:
    """Every probe is asked, also where a busy machine makes a call slow."""
    return unittest.mock.patch("mhacli.compute.check.probes.catalogue.is_too_slow", return_value=False)


def remembered_classes() -> contextlib.AbstractContextManager[object]:
    """Each class is looked for in its file once: before Python 3.13 `inspect` parses the whole file every time."""
    find, found = inspect.findsource, dict[tuple[str, str], tuple[list[str], int]]()

    def find_once(thing: object) -> tuple[list[str], int]:
        if not inspect.isclass(thing):
            return find(thing)  # type: ignore[arg-type]
        key = (inspect.getsourcefile(thing) or "", thing.__qualname__)
        if key not in found:
            found[key] = find(thing)
        return found[key]

    return unittest.mock.patch("inspect.findsource", find_once)


def written(folder: Path, case: Case, text: str) -> str:
    """The target of a case in a file of its own."""
    path = folder / f"{case.name}_{abs(hash(text))}.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:{case.name}"
