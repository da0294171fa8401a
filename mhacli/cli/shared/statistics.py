"""The options of head statistics that `heads` and `scan` share."""

from __future__ import annotations

from typing import Annotated

from mhacli.cli.numbers import Integer, Real
from mhacli.cli.options import number, option, option_group
from mhacli.record.heads import SINK_SHARE, SINK_TOKENS
from mhacli.settings import MAX_LENGTH, Reducer
from mhacli.text.conditions import INDUCTION

HEADS = "Heads"


@option_group
class StatisticsOptions:
    """The conditions and limits of head statistics."""

    pattern: Annotated[
        list[str] | None,
        option(
            HEADS,
            f"Report the attention where a condition holds, such as '{INDUCTION}'; repeatable.",
            "--where",
            "--pattern",
            metavar="CONDITION",
            common=True,
        ),
    ] = None
    sink_tokens: Annotated[
        int,
        number(
            HEADS,
            Integer(1, MAX_LENGTH),
            "Number of first tokens whose attention is reported together.",
            "--first-tokens",
            "--sink-tokens",
        ),
    ] = SINK_TOKENS
    sink_share: Annotated[
        float,
        number(
            HEADS,
            Real(high=1, above=0),
            "Smallest fraction of all attention that makes a key a sink.",
            "--sink-weight",
            "--sink-share",
            metavar="P",
        ),
    ] = SINK_SHARE
    reducer: Annotated[
        Reducer,
        option(HEADS, "Compute the statistics with torch, with one Triton kernel on a GPU, or with whichever can run."),
    ] = "auto"
