"""`mha diff`: compares two models over a text, or two saved records, these without torch: where they first differ."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import typer

from mhacli.cli.console import loading_torch, note, progress, show_activity
from mhacli.cli.output import (
    COLOUR,
    REPORT,
    Output,
    print_report,
    require_writable,
)
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import local_checkpoint, read_texts, record_command, require_not_blank
from mhacli.commands.diff.result import PLACES, DiffRequest, ModelDiff, Side
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.data import load_json
from mhacli.io.safetensors import read_tensor_header
from mhacli.models.folder import is_hub_id
from mhacli.record.storage import is_scan, require_agreement
from mhacli.render.base.options import HEADS_SHOWN, SEQUENCES_SHOWN, ViewOptions
from mhacli.settings import (
    ARG,
    MAX_LENGTH,
    MAX_TOKENS,
    MOST_TOKENS,
    VIEW,
    Config,
    Dtype,
    ModelSettings,
    Source,
    example_call,
    index_list,
    like,
    setting,
)
from mhacli.usercode.target import require_readable

_TOLERANCE = (
    "Of two records: largest difference that counts as equal, relative to the largest number of a site; 0 for the same bits. "
    "(default: 1e-12, 1e-5, 5e-3, 2e-2 for float64, float32, float16, bfloat16, by the coarser record)"
)
_CSV = "Print CSV: a line per place, or per site and per statistic of a head."
_HEADS = f"{HEADS_SHOWN} (default: those that changed most)"
_SEQUENCES = f"{SEQUENCES_SHOWN} (default: where a head changed most)"
_SAVE = "Save what the model A computes, for mha diff FILE B; B is left out."
_MODELS, _READ = "Models", "Text"
_ATTN = "Implementation of attention, such as eager or sdpa."
_EXAMPLE = "The call of code, such as 'lambda m, ids: m(ids)'."
_IDS = "Read these token ids, such as 5,17,3, instead of a text."
_MAP = "Compare modules of A with those of B by their names, such as 'model.layers.{i}=transformer.h.{i}'."
_TOKENIZER = "byte, or the path of a tokenizer.json."
_ONE = "Hold one model in memory at a time."
_A, _OTHER = "A checkpoint (DIR or hub id), FILE.py:NAME, or a saved file.", "What to compare with it."


def _pairs(text: str, name: str) -> Any:
    return setting((), _MODELS, text, name, metavar="NAME=VALUE", many=True)


@dataclass(frozen=True, kw_only=True)
class Models:
    """How to load two models, and what they read. Those of B are those of A unless they are given."""

    # fmt: off
    dtype: Dtype | None = setting(None, _MODELS, "Number format of both models.", default="that of the weights")
    dtype_b: Dtype | None = setting(None, _MODELS, "Number format of B.")
    attn: str | None = setting(None, _MODELS, _ATTN, metavar="NAME", default="transformers' choice")
    attn_b: str | None = setting(None, _MODELS, "Implementation of attention of B.", metavar="NAME")
    device: str = like(Config, "device", _MODELS)
    device_b: str | None = like(Config, "device", _MODELS, value=None, names=("--device-b",), help="Device of B.", default="")
    revision: str | None = like(ModelSettings, "revision", _MODELS, modes=("layer", "model"))
    revision_b: str | None = setting(None, _MODELS, "Branch, tag or commit of B.", metavar="NAME")
    arg_a: tuple[str, ...] = _pairs(ARG, "--arg-a")
    arg_b: tuple[str, ...] = _pairs("Argument of the constructor of B; repeatable.", "--arg-b")
    example_a: str | None = setting(None, _MODELS, _EXAMPLE, parse=example_call, metavar="LAMBDA", default="")
    example_b: str | None = setting(None, _MODELS, "The call of the code of B.", parse=example_call, metavar="LAMBDA", default="")
    tokenizer: str | None = setting(None, _READ, _TOKENIZER, default="that of the checkpoints")
    ids: tuple[int, ...] | None = setting(None, _READ, _IDS, parse=index_list, metavar="LIST", excludes=("typed", "text", "file"))
    max_tokens: int | None = setting(
        None, _READ, "Use only the first N tokens.", MAX_TOKENS, low=1, high=MAX_LENGTH, default=MOST_TOKENS)
    map: tuple[str, ...] = setting((), _MODELS, _MAP, metavar="LEFT=RIGHT", many=True)
    one_at_a_time: bool = setting(False, _MODELS, _ONE)
    # fmt: on


@command(
    'mha diff MODEL OTHER "the cat sat on the mat"',
    'mha diff MODEL MODEL "the cat sat on the mat" --dtype-b bfloat16',
    'mha diff MODEL model.py:build "the cat sat on the mat"',
    "mha diff before.safetensors after.safetensors",
)
def diff(
    a: str = setting("", "", _A, argument=True, metavar="A"),
    b: str | None = setting(None, "", _OTHER, argument=True, metavar="[B]"),
    tolerance: float | None = setting(None, "Comparison", _TOLERANCE, "--tolerance --atol", low=0, metavar="X"),
    view: Literal["heatmap", "none"] = setting("heatmap", VIEW, "How to draw each head of records."),
    *,
    source: Annotated[Source, offers("typed", "text", "file", "encoding", "errors", "max_bytes")],
    models: Models,
    options: Annotated[
        ViewOptions,
        offers("precision", "everything", "layers", "map_scale", heads=_HEADS, sequences=_SEQUENCES),
    ],
    output: Annotated[Output, offers("json", "png", "force", *COLOUR, csv=_CSV, save=_SAVE, **REPORT)],
) -> None:
    """Compares two models, place by place in the order of execution, or two records; exit code 3 if they differ."""
    if output.save is not None and b is not None:
        source, b = replace(source, typed=(b, *source.typed)), None
    has_text = bool(source.typed or source.text or source.file or models.ids)
    kinds = [_kind(word, has_text=has_text) for word in (a, b) if word is not None]
    require_writable(output.files, force=output.force)
    if "record" not in kinds and (b is not None or output.save is not None):
        if tolerance is not None:
            raise UsageError("--tolerance is for two records: what counts between models is measured")
        _diff_models(a, b, source, models, kinds, options, output)
        return
    if b is None:
        raise UsageError(
            "mha diff needs two things to compare", hint="mha diff A B, or mha diff A TEXT --save FILE of a model alone"
        )
    if has_text or kinds != ["record", "record"]:
        raise _unlike(a, b, kinds, has_text=has_text)
    _diff_records(a, b, tolerance, replace(options, view=view), output)


def _kind(word: str, *, has_text: bool) -> str:
    """What a word names: a record, a file of places, code, or a checkpoint. A word of which nothing exists is the id of a
    checkpoint on a hub where there is a text for it."""
    if os.path.isdir(word) and not is_scan(word):
        return "checkpoint"
    if not os.path.lexists(word) and ":" in word and not is_hub_id(word):
        require_readable(word)
        return "code"
    if os.path.isfile(word):
        document = read_tensor_header(word).metadata
        return "places" if isinstance(document, dict) and document.get("schema") == PLACES else "record"
    return "checkpoint" if has_text and is_hub_id(word) else "record"


def _unlike(a: str, b: str, kinds: list[str], *, has_text: bool) -> MhaError:
    """The error for two things that cannot be compared, or not with a text."""
    if kinds == ["record", "record"]:
        return UsageError("two records are compared without a text: they have one", hint="leave out the text")
    record, other = (a, b) if kinds[0] == "record" else (b, a)
    if not os.path.lexists(record):
        return MhaError(f"{record} does not exist", code="unreadable", path=record)
    message = f"{record} is a record, which lacks most places of a model such as {other}"
    return MhaError(
        message, hint="mha diff A TEXT --save FILE saves all places of A", code="cannot-compare", path=record
    )


# ---------------------------------------------------------------------------------------------------------------- models


def _diff_models(
    a: str, b: str | None, source: Source, models: Models, kinds: list[str], options: ViewOptions, output: Output
) -> None:
    texts = _texts(source, models, kinds)
    second: dict[str, Any] = {
        name: getattr(models, f"{name}_b") or getattr(models, name) for name in ("dtype", "attn", "device", "revision")
    }
    first = {name: getattr(models, name) for name in second}
    more = {"arg": models.arg_a, "example": models.example_a}, {"arg": models.arg_b, "example": models.example_b}
    sides: list[Any] = [Side(word=a, kind=kinds[0], **first, **more[0])]  # type: ignore[arg-type]
    sides += [] if b is None else [Side(word=b, kind=kinds[1], **second, **more[1])]  # type: ignore[arg-type]
    for side in sides:
        if side.kind == "checkpoint":
            local_checkpoint(ModelSettings(path=side.word, revision=side.revision))
    request = DiffRequest(
        a=sides[0],
        b=sides[1] if b is not None else None,
        texts=texts,
        save=output.save,
        force=output.force,
        command=record_command(),
        **{name: getattr(models, name) for name in ("ids", "tokenizer", "max_tokens", "map", "one_at_a_time")},
    )
    document = _computed(msgspec.to_builtins(request), in_child="code" in kinds)
    if output.save is not None:
        note(f"saved {output.save}: {document['n_places']} places")
        return
    found = ModelDiff(document)
    print_report(
        output,
        view=lambda on: found.view(on, everything=options.everything),
        json=lambda: found.to_dict(record_command()),
        csv=found.rows,
        name="mha diff",
        command=record_command(),
    )
    if found["verdict"] == "differ":
        raise typer.Exit(EXIT_CHECK)


def _texts(source: Source, models: Models, kinds: list[str]) -> tuple[str, ...]:
    """The text that both models read; none with ids, or beside a file that has them."""
    is_given = bool(source.typed or source.text or source.file)
    if "places" in kinds:
        if is_given or models.ids is not None:
            raise UsageError("a file of places has the ids that it was made of", hint="leave out the text")
        return ()
    if models.ids is not None:
        return ()
    if not is_given:
        hint = 'mha diff A B "the cat sat on the mat"; --file FILE and --ids LIST work too'
        raise UsageError("two models are compared over a text, and none is given", hint=hint)
    texts = tuple(read_texts(source))
    require_not_blank(texts)
    if len(texts) > 1:
        raise UsageError(
            f"mha diff reads one text, and {len(texts)} are given", hint="put quotation marks around the text"
        )
    return texts


def _computed(request: dict[str, Any], *, in_child: bool) -> Any:
    """The document of a comparison, which runs in a child process where it runs code of the user."""
    job = "mhacli.commands.diff.models:diff_request"
    with progress(has_time_left=False) as report_progress:
        stages: list[str] = []

        def stage(text: str, *, limited: bool = True) -> None:
            stages.append(text)
            report_progress(len(stages) / (len(stages) + 4), text)

        if in_child:
            from mhacli.usercode import process

            return load_json(process.run_in_child(job, request, time_limit_s=60.0, on_stage=stage)[0], "the comparison")
        with loading_torch():
            from mhacli.commands.diff.models import diff_request
        return load_json(diff_request(request, stage), "the comparison")


# --------------------------------------------------------------------------------------------------------------- records


def _diff_records(a: str, b: str, tolerance: float | None, options: ViewOptions, output: Output) -> None:
    from mhacli.commands.diff.run import diff as compare
    from mhacli.commands.diff.view import diff_view, require_drawable

    with show_activity("comparing"):
        found = compare(a, b, tolerance=tolerance)
    require_drawable((found.a, found.b), options)
    print_report(
        output,
        view=lambda on: diff_view(found, options, on),
        json=lambda: found.to_dict(record_command()),
        csv=found.rows,
        name="mha diff",
        command=record_command(),
    )
    require_agreement(found.a, a)
    require_agreement(found.b, b)
    if found.verdict == "nothing":
        message = "the two records have nothing in common that could be compared"
        hint = "compare two records of the same command, both with --model or both without"
        raise MhaError(message, hint=hint, code="nothing-in-common")
    if found.verdict == "differ":
        raise typer.Exit(EXIT_CHECK)
