"""What made a record, in lines: the command, the versions, the weights or their seed, the machine, the self-check.

Every picture carries them. No time is among them: the same record gives the same bytes.
"""

from __future__ import annotations

import shlex

from mhacli.render.base.format import count_of, number_text
from mhacli.results.record.consistency import contradictions
from mhacli.results.record.record import Record, SelfCheck
from mhacli.text.escape import visible

RECORD_BY = "record by"
"""The word for the command that made the record."""


def provenance(record: Record) -> tuple[tuple[str, str], ...]:
    """Pairs of a word and a line, both harmless to any surface's own escaper: `("record by", "mha run 'the cat' --heads 4")`.

    The command is that which made the record; a picture of it may have been asked for by another.
    """
    e = record.environment
    versions = f"mha {e.mha} · torch {e.torch} · numpy {e.numpy} · python {e.python}"
    device = f"{e.device} ({e.device_name}) · {record.config.dtype} · {count_of(e.threads, 'thread')} · {e.platform}"
    pairs = [
        (RECORD_BY, shlex.join(record.command)),
        ("versions", versions),
        _origin(record),
        ("machine", device),
        ("self-check", check_text(record.self_check)),
    ]
    found = contradictions(record)
    pairs += [("contradicts itself", "; ".join(found))] if found else []
    return tuple((word, visible(line)) for word, line in pairs)


def check_text(check: SelfCheck) -> str:
    """`ok: largest difference 1.2e-7, tolerance 4e-6`, or `FAILED: …`."""
    verdict = "ok" if check.ok else "FAILED"
    return f"{verdict}: largest difference {number_text(check.max_abs_error)}, tolerance {number_text(check.tolerance)}"


def _origin(record: Record) -> tuple[str, str]:
    """Where the weights come from: a checkpoint, somebody's own module, a file, or a seed."""
    if record.model is not None:
        m = record.model
        revision = f" · revision {m.revision}" if m.revision else ""
        return "model", f"{m.path}{revision} · {m.architecture} · {m.dtype} · inspected: {m.path_inspected}"
    if record.module is not None:
        return "module", f"{record.module.target} · seed {record.config.seed}"
    if record.weights is not None:
        return "weights", record.weights
    return "seed", f"{record.config.seed} · init {record.config.init}"
