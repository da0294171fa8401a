"""The scan of a corpus: finished units are kept, workers compute the others, and all are merged
into one record.

Units are computed by this process or by workers of Ray; the results do not depend on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from io import BytesIO
from itertools import islice
from time import perf_counter
from typing import Any

import torch

import mhacli
from mhacli.attention.statistics import is_compiled
from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import effects_of_heads, study_of, verified
from mhacli.errors import MhaError, library
from mhacli.io.data import json_checksum, plain
from mhacli.io.long_work import uninterrupted
from mhacli.models.load import LanguageHead, Loaded, checkpoint_digest, find, load_model
from mhacli.models.run import make_texts, run_of, spans_of_pair
from mhacli.record.corpus import BadEntry, CorpusSummary, named
from mhacli.record.effect import Effect
from mhacli.record.exports import Columns, EffectTable, HeadTable, arrow_of, columns_of, dicts_of
from mhacli.record.record import Record
from mhacli.text.reading import Document, documents, is_pipe

from .folder import (
    EFFECTS,
    UNIT_SIZE,
    Settings,
    Totals,
    Unit,
    UnitFiles,
    differences,
    open_folder,
)
from .progress import Progress
from .settings import Scan

FORMAT = 5
"""The version of the files of units."""
EXAMPLE_LEN = 64
"""The best length of an example in tokens: the longest document up to it, else the shortest."""
N_VERIFIED = 4
"""The number of removals of a document that are repeated by a second method."""
MAX_ATTEMPTS = 4
"""The number of processes that may end while computing one unit."""
BEGIN_AND_END_S = 20.0
"""Seconds in which Ray starts on this machine, or ends, before an interruption is raised."""
_BAD_CODES = ("no-tokens", "too-large", "not-finite", "unknown-token")
"""Codes of errors that are faults of a document, not of the model or the machine."""
_Computed = Iterator[tuple[Unit, UnitFiles, str]]


def run_scan(
    scan: Scan,
    done: Progress,
    *,
    report: Callable[[], None],
    is_stopped: Callable[[], bool],
    command: tuple[str, ...],
) -> Record:
    """The record of the corpus with the command, also written to the folder.

    It counts `done` documents, and then calls `report`. Once `is_stopped` returns True, no further
    unit is started, and at the end `KeyboardInterrupt` is raised. Raises `UsageError` for a folder
    with other settings or documents, and `MhaError` for documents, computations or files that fail.
    """
    corpus = documents(scan.sources, scan.form)  # a source that cannot be read leaves no folder
    with workers_of(scan) as (settings, compute):
        folder = open_folder(scan.out, settings, mixed=scan.mixed)
        names: list[str] = []
        known_names = folder.names()
        if not any(map(is_pipe, scan.sources)):
            done.of_documents = sum(1 for _ in documents(scan.sources, scan.form))
        report()
        began = perf_counter()

        def unfinished() -> Iterator[Unit]:
            for number, members in enumerate(iter(lambda: tuple(islice(corpus, UNIT_SIZE)), ())):
                if is_stopped():
                    return
                unit = Unit(number, members)
                name, totals = folder.finished(unit, known_names.pop(number, []))
                names.append(name)
                if totals is None or (scan.strict and totals.bad):
                    yield unit
                else:
                    done.add(totals)

        for unit, files, worker in compute(unfinished()):
            folder.write(unit.name(settings), files)
            done.seconds = perf_counter() - began
            done.add(folder.totals(unit.name(settings)), worker)
            report()
    if is_stopped():
        raise KeyboardInterrupt
    folder.require_no_more(known_names)
    done.of_documents = done.n_documents  # only the end of a stream shows its length
    return folder.record(names, spans=scan.span_names, command=command)


# ----------------------------------------------------------------------------------------- a worker


class Worker:
    """Computes units in this process. It gives the same bytes for the same unit, in any order.

    Relative paths are those of a process that runs in `folder`.
    """

    def __init__(self, scan: Scan, folder: str = ".") -> None:
        with suppress(OSError):
            os.chdir(folder)
        self._scan = scan

    @cached_property
    def _unloaded(self) -> Loaded:
        """The config and tokenizer of the model."""
        return find(self._scan.run.model, self._scan.run.checkpoint)

    @cached_property
    def _loaded(self) -> Loaded:
        """The model. Not loaded before the first unit, so that Ray counts processes that end
        meanwhile as attempts at this.
        """
        run = self._scan.run
        head: LanguageHead | None = "predict" if self._scan.effect else None
        return load_model(self._unloaded, run.model, head, allow_nonfinite=run.allow_nonfinite)

    def settings(self) -> Settings:
        """The settings of this process: the kind of its device with its name or instruction set,
        and the libraries that decide numbers. The weights of the model are hashed, not loaded.
        Raises `MhaError` for scans that the model does not support.
        """
        run, config = self._scan.run, self._unloaded.config
        device = self._unloaded.target
        if self._scan.span and config.is_encoder_decoder:
            raise spans_of_pair()
        usual = getattr(config, "dtype", None) or torch.float32
        dtype = run.model.dtype or str(usual).removeprefix("torch.")
        name = torch.backends.cpu.get_cpu_capability()
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        rows = f"parquet of pyarrow {version('pyarrow')}" if find_spec("pyarrow") else "jsonl"
        digest = checkpoint_digest(self._unloaded.checkpoint, run.model.tokenizer)
        settings = {
            "model": run.path,
            "model_digest": f"tiny {digest}" if run.model.tiny else digest,
            "mha": mhacli.__version__,
            "torch": torch.__version__.partition("+")[0],
            "build": torch.__version__,
            "transformers": version("transformers"),
            "dtype": dtype,
            "reducer": "c" if is_compiled(device, getattr(torch, dtype)) else "torch",
            "device": f"{device.type} {name}",
            "threads": torch.get_num_threads(),
            "rows": rows,
            "unit_size": UNIT_SIZE,
            "max_tokens": run.max_tokens,
            "layers": run.model.layers,
            "conditions": [condition.text for condition in run.statistics.conditions],
            "heads": run.statistics.heads,
            "first_tokens": run.statistics.first_tokens,
            "sink_weight": run.statistics.sink_weight,
            "spans": self._scan.span,
            "allow_nonfinite": self._scan.allow_nonfinite,
            "effect": self._scan.effect,
            "format": FORMAT,
        }
        return dict(plain(settings))

    def compute(self, unit: Unit, settings: Settings) -> tuple[UnitFiles, str]:
        """The files of a unit, and the name of this process. Each document is computed separately,
        as by `mha heads`.

        For the first good document, the outputs are compared with those without inspection, and
        some removals are repeated by a second method. Raises `MhaError` for errors that are not
        faults of a document, and if the device, the model or versions differ from the `settings` of
        the scan.
        """
        if changed := differences(settings, self.settings()):
            raise MhaError(
                f"a worker differs from its scan: {', '.join(changed.values())}",
                code="other-worker",
            )
        totals = Totals(devices=(settings["device"],), documents=(json_checksum(unit.documents),))
        good: list[DocumentRecord] = []
        best: DocumentRecord | None = None
        for document in unit.documents:
            try:
                record = self._inspected(document, is_compared=not good)
            except MhaError as fault:
                if self._scan.strict or fault.code not in _BAD_CODES:
                    fault.typed_message = (
                        f"{named(document.file, document.place)}: {fault.typed_message}"
                    )
                    raise
                reason = fault.typed_message.removeprefix("text 0 ").removeprefix("the text ")
                entry = BadEntry(document.file, document.place, reason)
                totals.merge(Totals(n_bad=1, bad=(entry,)))
                continue
            totals.add(document, record, spans=self._scan.span_names)
            good.append((document, replace(record, arrays={})))
            if best is None or _rank(record) > _rank(best[1]):
                best = document, record
        columns = _rows(good)
        rows = _rows_file(columns, settings["rows"])
        totals.rows = hashlib.sha256(rows).hexdigest()
        example = b"" if best is None else _example(*best, settings["device"]).to_bytes()
        files = UnitFiles(rows, example, totals.to_bytes(columns))
        return files, f"{platform.node()}, process {os.getpid()}"

    @torch.no_grad()
    def _inspected(self, document: Document, *, is_compared: bool) -> Record:
        """The record of a document, with the effects of removing each head. Raises `MhaError` with
        one of `_BAD_CODES` for a document that has none.
        """
        if document.reason or not document.text.strip():
            raise MhaError(document.reason or "only white space", code="no-tokens")
        request = replace(self._scan.run, texts=(document.text,))
        run = run_of(self._loaded, make_texts(request, self._unloaded, may_lack=True), request)
        record = run.run(verify=is_compared)
        if self._scan.effect:
            study = study_of(run, EffectSettings(verify=N_VERIFIED if is_compared else 0), record)
            record = replace(record, effects=verified(study.run()).effects)
        return record


DocumentRecord = tuple[Document, Record]
"""A document of a corpus, and its record."""


def _rank(record: Record) -> int:
    """The key by which the example is chosen."""
    n_tokens = len(record.keys[0].ids)
    return n_tokens if n_tokens <= EXAMPLE_LEN else -n_tokens


def _example(document: Document, record: Record, device: str) -> Record:
    """The record as that of a corpus of one document, without timings, details of the machine and
    text behind the tokens.
    """
    n_tokens = len(record.keys[0].ids)
    return replace(
        record,
        sequences=tuple(sequence.covered for sequence in record.sequences),
        context=record.context and tuple(sequence.covered for sequence in record.context),
        timings={},
        environment=replace(
            record.environment, device=device.partition(" ")[0], device_name=device
        ),
        effects=EffectTable(),
        corpus=CorpusSummary(
            1, n_tokens, 0, n_tokens, document.file, document.place, (device,), ()
        ),
    )


def _rows_file(columns: Columns, form: str) -> bytes:
    """The rows of a unit, as JSON lines or Parquet. Equal rows give equal bytes."""
    written = {name: column for name, column in columns.items() if not name.startswith("uniform_")}
    if form == "jsonl":
        encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        return "".join(f"{encode(row)}\n" for row in dicts_of(written)).encode()
    from pyarrow import parquet

    file = BytesIO()
    parquet.write_table(arrow_of(written), file, compression="zstd")
    return file.getvalue()


def _rows(good: Sequence[DocumentRecord]) -> Columns:
    """A row for each document, layer and head. The columns are `file`, `place` (line or row from 1,
    0 for a whole file), `n_documents` (1) and `n_tokens`, those of `HeadTable`, also of uniform
    attention, and the effects of removing the heads, if there are any.
    """
    of_heads = [(document, record) for document, record in good for _ in record.heads]
    heads = HeadTable(head for _, record in good for head in record.heads)
    effects = [effect for _, record in good for effect in effects_of_heads(record)]
    return {
        "file": (str, [document.file for document, _ in of_heads]),
        "place": (int, [document.place for document, _ in of_heads]),
        "n_documents": (int, [1] * len(of_heads)),
        "n_tokens": (int, [len(record.keys[0].ids) for _, record in of_heads]),
        **heads.columns(has_uniform=True),
        **(columns_of(effects, Effect, EFFECTS) if any(effects) else {}),
    }


# ------------------------------------------------------------------------------------------ engines


@contextmanager
def workers_of(scan: Scan) -> Iterator[tuple[Settings, Callable[[Iterator[Unit]], _Computed]]]:
    """The settings of the workers, and a function that computes units by them as they are done:
    with their files and the name of the worker. The worker is this process; or there are those of
    Ray, which is connected to a cluster or started on this machine, and they end with the context.
    Raises `MhaError` if no cluster answers.
    """
    if scan.ray is None and scan.workers is None:
        worker = Worker(scan)
        settings = worker.settings()
        yield settings, lambda units: ((unit, *worker.compute(unit, settings)) for unit in units)
        return
    ray = library("ray", "a scan with workers")
    address = scan.ray or "local"
    n_cpus = scan.workers * scan.n_cpus if scan.workers and address == "local" else None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with uninterrupted(BEGIN_AND_END_S):  # which also puts our handler of SIGTERM back
            ray.init(
                address,
                num_cpus=n_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
        first = _new_actor(ray, scan)
        settings = _result(ray, first.settings.remote(), "say its settings")
        yield settings, lambda units: _computed(ray, scan, units, settings=settings, idle=[first])
    except SystemError as fault:  # compiled functions of Ray raise it instead of an interruption
        raise fault.__cause__ or fault from None
    except (OSError, ValueError, RuntimeError) as fault:
        if ray.is_initialized():
            raise
        hint = "ray start --head starts a cluster here, and --ray local needs none"
        raise MhaError(f"--ray {address}: {fault}", hint=hint, code="no-cluster") from fault
    finally:
        with uninterrupted(BEGIN_AND_END_S):
            ray.shutdown()  # its processes would outlive this one


def _new_actor(ray: Any, scan: Scan) -> Any:
    """A further worker, which Ray starts again if it ends. Raises `MhaError` if no node has room
    for one.
    """
    needs, n_possible = _room(ray, scan)
    if not n_possible:
        hint = "--cpus-per-worker and --device say what a worker takes"
        raise MhaError(
            f"no node of the Ray cluster has room for a worker: {needs}",
            hint=hint,
            code="no-worker",
        )
    retries = {"max_restarts": -1, "max_task_retries": MAX_ATTEMPTS - 1}
    return ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"], **retries)(Worker).remote(
        scan, os.getcwd()
    )


def _room(ray: Any, scan: Scan) -> tuple[dict[str, int], int]:
    """What a worker takes, and the number of workers: as many as requested, at most as many as fit
    on the nodes.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    device = scan.run.model.device
    on_gpu = device.startswith("cuda") or (
        device == "auto" and any(node.get("GPU") for node in nodes)
    )
    needs = {"CPU": scan.n_cpus, "GPU": int(on_gpu)}
    n_possible = sum(
        int(min(node.get(name, 0) // n for name, n in needs.items() if n)) for node in nodes
    )
    return needs, min(n_possible, scan.workers or n_possible)


def _computed(
    ray: Any, scan: Scan, units: Iterator[Unit], *, settings: Settings, idle: list[Any]
) -> _Computed:
    """The units as workers of Ray compute them. There are as many workers as there is room for, and
    nodes may join at any time. Raises `MhaError` also for a unit during which too many processes
    end.
    """
    calls = dict[Any, tuple[Any, Unit]]()
    while True:
        for unit in islice(units, max(0 if calls else 1, _room(ray, scan)[1] - len(calls))):
            actor = idle.pop() if idle else _new_actor(ray, scan)
            calls[actor.compute.remote(unit, settings)] = actor, unit
        for actor in idle:
            ray.kill(actor)  # its room may be needed by one that Ray starts again
        if not calls:
            return
        (call,), _ = ray.wait([*calls])
        actor, unit = calls.pop(call)
        idle = [actor]
        yield unit, *_result(ray, call, f"compute unit {unit.number} ({unit.named})")


def _result(ray: Any, call: Any, job: str) -> Any:
    """The result of a call. Raises its exception, and `MhaError` if too many processes have
    ended.
    """
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as fault:
        raise fault.cause from None
    except ray.exceptions.RayError as fault:
        hint = (
            "its node may lack memory: --max-tokens shortens documents, --cpus-per-worker makes"
            " workers fewer"
        )
        raise MhaError(
            f"no worker could {job}: {type(fault).__name__}", hint=hint, code="worker-ended"
        ) from fault
