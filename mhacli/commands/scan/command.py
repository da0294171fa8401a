"""`mha scan`: the statistics of every head over a corpus, in a folder from which an interrupted
scan resumes.
"""

import json
import os
import re
import shlex
from dataclasses import asdict, replace
from time import monotonic
from typing import Annotated

from mhacli.cli.console import flush, loading_torch, note, progress, require_folder, stderr_line
from mhacli.cli.output import Output, print_record, require_output, require_self_check
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import local_checkpoint, record_command
from mhacli.errors import UsageError
from mhacli.io.files import require_folder_writable
from mhacli.io.long_work import graceful_interrupt
from mhacli.text.reading import documents
from mhacli.text.spans import require_expressions

from .progress import Progress
from .settings import Scan

_WITH_VALUE = "out|workers|ray|cpus-per-worker|device|device-map|colou?r|width|sort"
_WITHOUT_EFFECT = re.compile(rf"\0--(json|all|mixed|strict|({_WITH_VALUE})[=\0][^\0]*)(?=\0|$)")
"""Options that do not decide the numbers, among words that NUL separates."""


@command(
    "mha scan --model MiniLM poem.txt --lines --out heads.mha",
    "mha scan --model MiniLM 'texts/*.jsonl' --max-tokens 512 --out heads.mha",
    "mha show heads.mha",
)
def scan(output: Annotated[Output, offers("json")], request: Scan) -> None:
    """Scans a corpus into a folder and prints the overview of the heads.

    After Ctrl-C the documents in progress are finished; a second Ctrl-C and SIGTERM stop at once.
    """
    needed = {
        "--model MiniLM": request.model.path,
        "--out heads.mha": request.out,
        "a corpus": request.sources,
    }
    for words, value in needed.items():
        if not value:
            raise UsageError(f"mha scan needs {words}", hint="mha scan --help shows examples")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "mha scan is one process, not one of several of torchrun or srun (WORLD_SIZE is set)",
            hint="--workers N uses this machine, --ray auto a cluster",
        )
    require_output(request.view, output, has_effects=request.effect)
    require_folder()
    require_folder_writable(request.out)
    documents(request.sources, request.form)
    local_checkpoint(request.model)
    require_expressions(request.span)
    with loading_torch():
        from .run import run_scan

    stopping = "finishing the documents in progress; press Ctrl-C again to stop at once"
    done = Progress()
    shown_at = 0.0

    def kept() -> str:
        return f"{done.n_documents:,} documents are done; the same command resumes the scan"

    with (
        progress(kept=kept, log_every_s=None if output.json else 60.0) as report_progress,
        graceful_interrupt(lambda: note(stopping)) as is_stopped,
    ):

        def report(*, is_last: bool = False) -> None:
            nonlocal shown_at
            n = done.of_documents
            report_progress(str(done), None if n is None else done.n_documents / max(n, 1))
            if output.json and (is_last or monotonic() - shown_at >= 1):
                shown_at = monotonic()
                stderr_line(json.dumps({"progress": asdict(done)}))

        record = run_scan(
            request, done, report=report, is_stopped=is_stopped, command=_recorded_command()
        )
        report(is_last=True)
    print_record(record, replace(request.view, view="none", heads=None), output)
    flush()
    if record.corpus is not None and record.corpus.bad:
        bad = record.corpus.bad[0]
        note(f"left out {bad.named}: {bad.reason}")
    note(f"saved {request.out}; mha show {shlex.quote(request.out)} shows it again")
    require_self_check(record)
    if output.suggests:
        from mhacli.cli.next_steps import head_of_saved, print_steps

        print_steps(head_of_saved(record, request.view, request.out))


def _recorded_command() -> tuple[str, ...]:
    """The command line for the record, the same however the numbers are computed and printed."""
    return tuple(_WITHOUT_EFFECT.sub("", "\0".join(record_command())).split("\0"))
