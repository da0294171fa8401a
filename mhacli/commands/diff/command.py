"""`mha diff`: compares two models over a text, or a model and the outputs of another program, or
two saved records, these without torch: where they first differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhacli.cli.console import loading_torch, note, progress
from mhacli.cli.output import REPORT, Output, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import (
    local_checkpoint,
    read_record,
    read_texts,
    record_command,
    require_not_blank,
)
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.data import decode
from mhacli.io.safetensors import is_of_arrays
from mhacli.models.folder import is_hub_id
from mhacli.record.record import Record
from mhacli.render.base.options import ViewOptions
from mhacli.settings import ARRAYS, AXES, Source, setting

from .request import DiffRequest
from .result import ModelDiff, ModelDocument, RecordDiff

if TYPE_CHECKING:
    from mhacli.cli.next_steps import NextStep

_TOLERANCE = (
    "Of two records: largest difference that counts as equal, relative to the largest number of a"
    " site; 0 for the same bits. (default: 1e-12, 1e-5, 5e-3, 2e-2 for float64, float32, float16,"
    " bfloat16, by the coarser record)"
)
_CSV = "Print CSV: a line per place, or per site and per statistic of a head."
_SAVE = "Save what A computes, for mha diff FILE B later; give no B now."


@command(
    'mha diff MODEL OTHER "the cat sat on the mat"',
    'mha diff MODEL MODEL "the cat sat on the mat" --dtype-b bfloat16',
    'mha diff MODEL model.py:build "the cat sat on the mat"',
    "mha diff MODEL outputs.safetensors 'the cat' --map 'h.{i}.mlp=blocks.{i}.ffn'",
    "mha diff before.safetensors after.safetensors",
)
def diff(
    request: DiffRequest,
    *,
    tolerance: float | None = setting(
        None, "Comparison", _TOLERANCE, "--tolerance --atol", low=0, metavar="X"
    ),
    axes: str | None = setting(None, ARRAYS, AXES, metavar="LIST"),
    source: Annotated[Source, offers("typed", "text", "file", "encoding", "errors", "max_bytes")],
    options: Annotated[ViewOptions, offers("everything", "layers")],
    output: Annotated[Output, offers("json", "force", csv=_CSV, save=_SAVE, html=REPORT["html"])],
) -> None:
    """Compares two models, place by place in the order of execution, or two records; exit code 3 if
    they differ.
    """
    if output.save is not None and request.b is not None:
        source = replace(source, typed=(request.b, *source.typed))
        request = replace(request, b=None)
    has_text = bool(source.typed or source.text or source.file) or request.ids is not None
    kinds = _kinds(request, is_saved=output.save is not None, has_text=has_text)
    require_writable(output.files, force=output.force)
    result: RecordDiff | ModelDiff
    steps: Callable[[], Iterable["NextStep"]]
    if set(kinds) <= {"record", "tensors"}:
        if axes is not None and "tensors" not in kinds:
            note("--axes changes nothing without weights of attention")
        from .records import compare_records
        from .steps import steps_of_records
        from .view import record_view, require_layers

        with progress("comparing"):
            result = compare_records(request.a, request.b, tolerance, partial(_read, axes=axes))
        require_layers(result, options)
        view = partial(record_view, result, options=options)
        steps = partial(steps_of_records, result, options)
    else:
        if tolerance is not None:
            message = "--tolerance is for two records: what counts between models is measured"
            raise UsageError(message)
        if axes is not None:
            raise UsageError("--axes is for weights of attention: outputs of a model have names")
        call = tuple(record_command())
        request = replace(request, save=output.save, force=output.force, command=call)
        document = _of_models(request, source, kinds)
        if output.save is not None:
            note(f"saved {output.save}: {document['n_places']} places")
            return
        from .steps import steps_of_models
        from .view import model_view

        result = ModelDiff(decode(ModelDocument, document, "the comparison"))
        view = partial(model_view, result, options=options)
        steps = partial(steps_of_models, result, request, source, options)
    print_report(
        output,
        view=view,
        json=lambda: result.to_dict(record_command()),
        csv=lambda: [*result.rows()],
    )
    if output.suggests and axes is None:
        from mhacli.cli.next_steps import print_steps

        print_steps(steps())
    if result.verdict == "nothing":
        message = "the two records have nothing in common that could be compared"
        hint = "compare two records of the same command, both with --model or both without"
        raise MhaError(message, hint=hint, code="nothing-in-common")
    if result.verdict == "differ":
        raise typer.Exit(EXIT_CHECK)


def _read(path: str, axes: str | None) -> Record:
    """The record in a file, or that of weights with these axes."""
    return read_record(path, axes if is_of_arrays(path) else None)


def _kinds(request: DiffRequest, *, is_saved: bool, has_text: bool) -> list[str]:
    """What the two are. Raises `MhaError` if they cannot be compared, or not with or without a
    text.
    """
    sides = request.sides
    kinds: list[str] = [side.kind for side in sides]
    are_records = set(kinds) <= {"record", "tensors"}
    if len(sides) == 1 and (not is_saved or are_records):
        hint = "mha diff A B, or mha diff A TEXT --save FILE of a model alone"
        raise UsageError("mha diff needs two things to compare", hint=hint)
    if has_text and ("places" in kinds or are_records):
        what = "a file of places has the ids" if "places" in kinds else "a record has the text"
        raise UsageError(
            f"{what} that it was made of: it is compared without a text", hint="leave out the text"
        )
    if not has_text and "places" not in kinds:
        for side in sides:
            if is_hub_id(side.word):
                raise MhaError(f"{side.word} does not exist", code="unreadable", path=side.word)
    if not are_records and not {"record", "places"} & set(kinds) and not has_text:
        hint = 'mha diff A B "the cat sat on the mat"; --file FILE and --ids LIST work too'
        raise UsageError("two models are compared over a text, and none is given", hint=hint)
    if kinds[0] == "tensors" and not are_records:
        message = f"{sides[0].word} has tensors of another program, which are compared as B"
        raise UsageError(message, hint="mha diff MODEL FILE TEXT")
    if "record" in kinds and not are_records:
        record, other = sides if kinds[0] == "record" else sides[::-1]
        message = (
            f"{record.word} is a record, which lacks most places of a model such as {other.word}"
        )
        hint = "mha diff A TEXT --save FILE saves all places of A"
        raise MhaError(message, hint=hint, code="cannot-compare", path=record.word)
    return kinds


def _of_models(request: DiffRequest, source: Source, kinds: list[str]) -> Any:
    """The document of a comparison, which runs in a child process where it runs code of the
    user.
    """
    texts = list[str]()
    if request.ids is None and "places" not in kinds:
        texts = read_texts(source)
    require_not_blank(texts)
    if len(texts) > 1:
        message = f"mha diff reads one text, and {len(texts)} are given"
        raise UsageError(message, hint="put quotation marks around the text")
    for side in request.sides:
        if side.kind == "checkpoint":
            local_checkpoint(side)
    job = "mhacli.commands.diff.models:diff_request"
    sent = asdict(replace(request, text="".join(texts)))
    with progress() as stage:
        if "code" in kinds:
            from mhacli.usercode import process

            result, _ = process.run_in_child(job, sent, time_limit_s=60.0, on_stage=stage)
        else:
            with loading_torch():
                from .models import diff_request
            result = diff_request(sent, stage)
    return result
