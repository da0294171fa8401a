"""The libraries of the extra `hf`, brought in only for `--model`: quiet, offline for folders, and never running foreign code."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mhacli.errors import MhaError
from mhacli.io.extras import HF, installing
from mhacli.text.tokenizers.file import silent_stderr

T = TypeVar("T")
OLDEST = (5, 3)
"""Earlier releases of transformers had holes through which a config.json ran code."""


def transformers() -> Any:
    """The library, at a release without known holes, and silent. Raises `MhaError` where it is missing or too old."""
    os.environ.setdefault("RUST_BACKTRACE", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as fault:
        missing = getattr(fault, "name", None) or "transformers"
        raise MhaError(
            f"the transformers library must be installed to read a checkpoint, got no {missing}",
            hint=f"{installing(*HF)} installs it",
            code="missing-extra",
        ) from None
    release = tuple(int(part) for part in library.__version__.split(".")[:2])
    if release < OLDEST:
        raise MhaError(
            f"transformers must be at least {OLDEST[0]}.{OLDEST[1]}, before which a checkpoint's config could run code, got "
            f"{library.__version__}",
            hint=f"{installing(*HF)} brings a newer one",
            code="missing-extra",
        )
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def guarded(what: str, path: str, call: Callable[[], T]) -> T:
    """What a call of the libraries gives. A fault in it, a panic of their native code among them, is one line of ours."""
    try:
        with silent_stderr():
            return call()
    except (MemoryError, MhaError):
        raise
    except BaseException as fault:
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise  # an interrupt is none of the file's faults
        said = _said_by(fault)
        raise MhaError(
            f"{what} of {path} must be usable by transformers, got: {said:.300}", code="bad-file", path=path
        ) from None


def _said_by(fault: BaseException) -> str:
    """The first line of a fault's message, with the next one where it only announces that; a key that is missing, as such."""
    lines = [line for line in str(fault).splitlines() if line.strip()]
    if not lines or isinstance(fault, KeyError):
        return ": ".join([type(fault).__name__, *lines[:1]])
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


@contextmanager
def offline() -> Iterator[None]:
    """Within it nothing is asked of a hub."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
