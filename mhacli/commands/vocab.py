"""`mha vocab`: counts the tokens of a text of any size, read as a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import progress
from mhacli.cli.output import Output, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.io.files import write_whole
from mhacli.render.base.options import ViewOptions
from mhacli.settings import OUTPUT, TOKENIZER, TOP, VIEW, Config, Source, like, setting
from mhacli.text.escape import token_label

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.text.tokenizers import Entry

_MAX_BYTES = 100 << 20
MAX_ROWS = 24
_MOST_SUGGESTED = 4096
"""The most tokens for which a computation is suggested."""
_TOP = "Show only the K most frequent tokens, most frequent first."
_SAVE = "Save the whole vocabulary in this file, for --vocab."


@command("mha vocab --file poem.txt --top 20", "mha vocab --file poem.txt --save vocabulary.json")
def vocab(
    source: Source,
    config: Annotated[
        Config, offers("keep_case", "punctuation", tokenizer=f"{TOKENIZER} (default: word)")
    ],
    *,
    top: int | None = setting(None, OUTPUT, _TOP, TOP, low=1, high=10**9, metavar="K", common=True),
    everything: bool = like(ViewOptions, "everything", VIEW),
    output: Annotated[Output, offers("json", "force", save=_SAVE)],
) -> None:
    """Counts the tokens of the texts and prints the vocabulary."""
    from mhacli.cli.source import texts_of
    from mhacli.text.tokenizers import entries, make_tokenizer, no_tokens, vocabulary_json

    require_writable(output.files, force=output.force)
    tokenizer = make_tokenizer(config, source.max_token_len)
    source = replace(source, max_bytes=source.max_bytes or _MAX_BYTES)
    counts: Counter[str] = Counter()
    with progress("counting"):
        for name, pieces in texts_of(source):
            tokens = tokenizer.count(pieces)
            if not tokens:
                raise no_tokens(name or "the text")
            counts.update(tokens)
    rows = entries(counts, tokenizer.vocabulary, of_bytes=config.tokenizer == "byte")
    if output.save is not None:
        write_whole(
            output.save, vocabulary_json(rows, config.tokenizer).encode(), force=output.force
        )
    if top is not None:
        rows = sorted(rows, key=lambda row: (-row.count, row.id))[:top]
    room = len(rows) if everything or top is not None else MAX_ROWS
    print_report(
        output,
        view=lambda on: vocabulary_table(rows, counts, room, on.width),
        json=lambda: vocabulary_json(rows, config.tokenizer),
    )
    if output.suggests and counts.total() <= _MOST_SUGGESTED:
        from mhacli.cli.next_steps import NextStep, again, print_steps

        if (words := again("heads")) is not None:
            print_steps([NextStep(words, "computes what each head does with these tokens")])


def vocabulary_table(
    rows: Sequence[Entry], counts: Counter[str], room: int, width: int
) -> RenderableType:
    """Token, id, count and bytes; the first and last rows if there are more than `room`."""
    from msgspec.structs import asdict
    from rich.console import Group

    from mhacli.render.base.doc import Table, fields
    from mhacli.render.base.format import count_of
    from mhacli.render.base.terminal import table

    columns = fields({"id": "id", "token": "word", "count": "integer", "bytes": "id"})
    shown = [asdict(row) | {"token": token_label(row.token)} for row in rows]
    title = f"{count_of(counts.total(), 'token')}, {len(counts)} distinct"
    return Group(
        *table(Table(columns=columns, rows=shown, title=title, most=room, has_ends=True), width)
    )
