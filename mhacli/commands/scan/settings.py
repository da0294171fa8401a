"""The settings of `mha scan`: the corpus, what to compute, the workers and the folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from mhacli.cli.parameters import offers
from mhacli.render.base.options import HEADS_COMPUTED, ViewOptions
from mhacli.run import Run
from mhacli.settings import (
    CHECKPOINT,
    HEADS,
    OUTPUT,
    Computation,
    Config,
    ModelSettings,
    Statistics,
    like,
    setting,
)
from mhacli.text.reading import CORPUS, CorpusFormat

_WORKERS = "Workers"


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The corpus, what to compute of each document, the workers and the folder of the result, as
    the command line gives them.

    A document may lack spans. The workers do not change the result; each receives the pickled scan,
    and loads the model.
    """

    sources: tuple[str, ...] = setting(
        (),
        CORPUS,
        "Text files, JSON lines, Parquet, CSV or globs; - reads stdin.",
        metavar="CORPUS...",
        argument=True,
    )
    form: CorpusFormat
    max_tokens: int | None = like(
        Computation,
        "max_tokens",
        CORPUS,
        help="Use only the first N tokens of each sequence. (default: all; sequences too long for"
        " the model are left out)",
        default=None,
        common=True,
    )
    strict: bool = setting(False, CORPUS, "Stop at a bad document instead of leaving it out.")
    model: ModelSettings = ModelSettings()
    tokenizer: str | None = like(
        Config, "tokenizer", CHECKPOINT, value=None, default="the checkpoint's own", common=False
    )
    span: tuple[str, ...] = setting(
        (),
        HEADS,
        "Report the attention between parts of the documents that have them: name=/REGEX/;"
        " repeatable.",
        metavar="SPAN",
    )
    effect: bool = setting(
        False,
        HEADS,
        "Also remove each head in turn, and report what changes at the first [MASK], else the last"
        " token.",
        common=True,
    )
    allow_nonfinite: bool = like(Computation, "allow_nonfinite", CHECKPOINT)
    statistics: Statistics = Statistics()
    given: Annotated[
        Mapping[str, Any],
        Config,
        offers(
            "device",
            dtype="Number format of the computation. (default: that of the checkpoint)",
            threads="Number of CPU threads. (default: 1; another number changes the rounding)",
        ),
    ]
    workers: int | None = setting(
        None,
        _WORKERS,
        "Number of workers, each with the model in its memory (needs the extra scan). "
        "(default: this process alone; with --ray, as many as there is room for)",
        low=1,
        high=100_000,
        common=True,
    )
    ray: str | None = setting(
        None,
        _WORKERS,
        "Compute on the Ray cluster at this address; auto: the cluster that this machine belongs"
        " to; local: a new one here.",
        metavar="ADDRESS",
    )
    cpus_per_worker: int | None = setting(
        None,
        _WORKERS,
        "CPUs that Ray reserves for each worker. (default: as many as --threads)",
        low=1,
        high=100_000,
        needs=("workers", "ray"),
    )
    out: str = setting(
        "",
        OUTPUT,
        "Folder of the result. An interrupted scan resumes from it.",
        metavar="DIR",
        common=True,
    )
    mixed: bool = setting(
        False,
        OUTPUT,
        "Allow results from different kinds of devices in one folder; the result records this.",
    )
    view: Annotated[
        ViewOptions, offers("everything", "sort", heads=f"{HEADS_COMPUTED} (default: all)")
    ]

    @cached_property
    def run(self) -> Run:
        """The run that `mha heads` would make for a document, without its text."""
        heads = None if self.view.heads is None else tuple(sorted(set(self.view.heads)))
        return Run(
            model=replace(self.model, tokenizer=self.tokenizer, **{"threads": 1, **self.given}),
            statistics=replace(self.statistics, heads=heads),
            spans=self.span,
            max_tokens=self.max_tokens,
            keep=(),
            allow_nonfinite=self.allow_nonfinite,
        )

    @property
    def span_names(self) -> tuple[str, ...]:
        """The names of the spans."""
        return tuple(word.partition("=")[0].strip() for word in self.span)

    @property
    def n_cpus(self) -> int:
        """The processors of a worker of Ray."""
        return self.cpus_per_worker or self.run.model.threads or 1
