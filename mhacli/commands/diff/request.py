"""What `mha diff` compares: two things that words name, how to load them if they are models, and
what these read.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from mhacli.errors import MhaError, UsageError
from mhacli.io.safetensors import is_of_arrays, read_tensor_header
from mhacli.models.folder import checkpoint_path, is_hub_id
from mhacli.record.storage import is_scan
from mhacli.settings import (
    Computation,
    Config,
    Dtype,
    ModelSettings,
    OwnCode,
    example_call,
    index_list,
    like,
    setting,
)
from mhacli.usercode.target import require_readable

PLACES = "mha.places/1"
"""The schema of a file of what a model computes."""
_MODELS = "Models"
_READ = "Text"
_A = "A checkpoint (DIR or hub id), FILE.py:NAME, or a saved file."
_OTHER = "What to compare with it."
_ATTN = "Implementation of attention, such as eager or sdpa."
_EXAMPLE = "The call of code, such as 'lambda m, ids: m(ids)'."
_IDS = "Read these token ids, such as 5,17,3, instead of a text."
_MAP = (
    "Compare modules of A with those of B by their names, such as"
    " 'model.layers.{i}=transformer.h.{i}'."
)
_TOKENIZER = "byte, or the path of a tokenizer.json."
_TEXTS = ("typed", "text", "file")
_pairs: Any = partial(setting, metavar="NAME=VALUE", many=True)
_call: Any = partial(setting, parse=example_call, metavar="LAMBDA", default="")


class MapForm(NamedTuple):
    """The names of modules of A and B that belong together, with `{i}` for a number, and both as
    the user wrote them.
    """

    left: str
    right: str
    word: str


def map_forms(words: Sequence[str]) -> list[MapForm]:
    """The forms of `--map LEFT=RIGHT`. Raises `UsageError`."""
    forms = list[MapForm]()
    for word in words:
        names = word.split("=")
        if len(names) != 2:
            raise UsageError(
                f"--map {word[:100]!r} is not of the form 'model.layers.{{i}}=transformer.h.{{i}}'"
            )
        forms.append(MapForm(names[0], names[1], word[:100]))
    return forms


@dataclass(frozen=True, kw_only=True)
class Side(ModelSettings):
    """One of the two things, with the implementation of attention of a checkpoint, and of code the
    arguments and the call.
    """

    attn: str | None
    arg: tuple[str, ...]
    example: str | None

    @property
    def word(self) -> str:
        """Its path, its name, or its id on a hub."""
        return self.path or ""

    @cached_property
    def kind(self) -> Literal["checkpoint", "code", "places", "record", "tensors"]:
        """What it is: a checkpoint, code that builds a model, a file of what a model computed, a
        record, or tensors of another program. Raises `MhaError` if it does not exist or cannot be
        read.
        """
        word = self.word
        if is_hub_id(word) or (os.path.isdir(checkpoint_path(word)) and not is_scan(word)):
            return "checkpoint"
        if os.path.isfile(word) and is_of_arrays(word):
            return "tensors"
        if os.path.lexists(word):
            document = read_tensor_header(word).metadata if os.path.isfile(word) else {}
            if document is None:
                return "tensors"
            is_places = isinstance(document, dict) and document.get("schema") == PLACES
            return "places" if is_places else "record"
        if ":" not in word:
            raise MhaError(f"{word} does not exist", code="unreadable", path=word)
        require_readable(word)
        return "code"


@dataclass(frozen=True, kw_only=True)
class DiffRequest:
    """Two things to compare, or one model to be saved; how to load models, and what they read. What
    is not given for B is that of A.
    """

    a: str = setting("", "", _A, argument=True, metavar="A")
    b: str | None = setting(None, "", _OTHER, argument=True, metavar="[B]")
    dtype: Dtype | None = setting(
        None, _MODELS, "Number format of both models.", default="that of the weights"
    )
    dtype_b: Dtype | None = setting(None, _MODELS, "Number format of B.")
    attn: str | None = setting(None, _MODELS, _ATTN, metavar="NAME", default="transformers' choice")
    attn_b: str | None = setting(None, _MODELS, "Implementation of attention of B.", metavar="NAME")
    device: str = like(Config, "device", _MODELS)
    device_b: str | None = like(
        Config,
        "device",
        _MODELS,
        value=None,
        names=("--device-b",),
        help="Device of B.",
        default="",
    )
    revision: str | None = like(ModelSettings, "revision", _MODELS, modes=("layer", "model"))
    revision_b: str | None = setting(None, _MODELS, "Branch, tag or commit of B.", metavar="NAME")
    arg_a: tuple[str, ...] = like(OwnCode, "arg", _MODELS, common=False)
    arg_b: tuple[str, ...] = _pairs((), _MODELS, "Argument of the constructor of B; repeatable.")
    example_a: str | None = _call(None, _MODELS, _EXAMPLE)
    example_b: str | None = _call(None, _MODELS, "The call of the code of B.")
    tokenizer: str | None = setting(None, _READ, _TOKENIZER, default="that of the checkpoints")
    ids: tuple[int, ...] | None = setting(
        None, _READ, _IDS, parse=index_list, metavar="LIST", excludes=_TEXTS
    )
    max_tokens: int | None = like(Computation, "max_tokens", _READ)
    map: tuple[str, ...] = setting((), _MODELS, _MAP, metavar="LEFT=RIGHT", many=True)
    one_at_a_time: bool = setting(False, _MODELS, "Hold one model in memory at a time.")

    text: str = ""
    save: str | None = None
    force: bool = False
    command: tuple[str, ...] = ()

    @cached_property
    def sides(self) -> tuple[Side, ...]:
        """A, and B if there is one."""
        names = ("device", "dtype", "revision", "attn")
        of_a = {name: getattr(self, name) for name in ("tokenizer", *names)}
        of_b = of_a | {name: getattr(self, f"{name}_b") or of_a[name] for name in names}
        a = Side(path=self.a, arg=self.arg_a, example=self.example_a, **of_a)
        if self.b is None:
            return (a,)
        return a, Side(path=self.b, arg=self.arg_b, example=self.example_b, **of_b)
