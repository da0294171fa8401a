"""Examinations made by hand, and what their report shows."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from mhacli.render.base.options import Screen
from mhacli.render.reports.check import check_view
from mhacli.results.check import Argument, Choice, Examination, Finding, FirstDifference, OutputComparison, ProbeResult

AXIS = Finding(
    "softmax-axis",
    "the softmax runs over another axis than the keys",
    "matches exactly if the softmax runs over queries instead of keys: largest difference 2.2e-16, tolerance 5e-05\n"
    "smallest example, 1 sequence of 2 tokens: the output is off by 0.31 (its largest number is 1.24)",
    "scores.softmax(dim=-1)",
    effect="the weights of a query do not sum to 1: some outputs are nearly 0, others much too large",
    proven=True,
    error=2.2e-16,
    tolerance=5e-5,
    file="mine.py",
    line=31,
    source="        attn = torch.softmax(scores, dim=-2)\n",
)
STATE = Finding(
    "state-kept-between-calls", "it remembers earlier calls", "the same input gives another output", "reset the cache"
)
PROBES = (
    ProbeResult("determinism", "the same input gives the same output, also after another one", 0.0, True),
    ProbeResult("visible keys", "every token sees every token", 1.0),
    ProbeResult("mask", "it takes no mask that could be tried"),
    ProbeResult("padding", "it takes no padding that could be tried"),
    ProbeResult("causality", "in 21 of 21 pairs the later token moves the earlier output, by up to 95%", 21.0),
    ProbeResult("row sums", "the rows of the returned pattern miss one by up to 2.3", 2.3, False),
    ProbeResult("float16", "differs from float64 by 0.0007 of the output's size", 7e-4, True),
    ProbeResult("300 tokens", "raises RuntimeError: too long"),
    ProbeResult("parameters", "16,640, as four projections with biases have", 16640.0, True),
    ProbeResult("keys permuted", "left out: a call takes 0.2 s, and this takes 2 or more"),
    ProbeResult("one key", "left out: a call takes 0.2 s, and this takes 2 or more"),
)
WRONG = Examination(
    "wrong",
    "mine.py:MultiHeadAttention",
    "forward(x)[0]",
    (
        Argument("d_model", "64", "given"),
        Argument("n_heads", "8", "guessed", "the number of heads"),
        Argument("dropout", "0.1", "default"),
    ),
    (AXIS,),
    (Choice("no-bias", "no projection has a bias"),),
    PROBES,
    OutputComparison("reference", "float64", 12, 2.2e-16, 5e-5),
    n_parameters=16640,
    n_hypotheses=117,
    time_s=2.5,
    environment={"mha": "0.1.0", "torch": "2.13.0"},
)
RIGHT = replace(WRONG, verdict="right", findings=(), probes=PROBES[:5], n_hypotheses=1)
UNKNOWN = replace(
    WRONG,
    verdict="unknown",
    findings=(),
    reason="nothing in the catalogue explains what it answers",
    closest="if the scores are scaled twice, the reference still differs by 0.4",
    departure=FirstDifference("scores", "qk", "mine.py", 28, "    scores = scores ** 2"),
    printed="hello\n\nthere\n",
)
ALIKE = replace(
    RIGHT, against="theirs.py:Attention", comparison=OutputComparison("theirs.py:Attention", "float32", 3, None, 1e-5)
)


def drawn(examination, width=80, colour=False):
    paper = io.StringIO()
    console = Console(
        file=paper, width=width, force_terminal=colour, color_system="truecolor" if colour else None, no_color=not colour,
        markup=False, emoji=False, highlight=False, legacy_windows=False,
    )  # fmt: skip
    console.print(check_view(examination, Screen(width, colour)))
    return "\n".join(line.rstrip() for line in paper.getvalue().split("\n"))
