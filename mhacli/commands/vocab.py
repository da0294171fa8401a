"""`mha vocab`: counts the tokens of a text of any size, read as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import show_activity
from mhacli.cli.help import examples
from mhacli.cli.output import COLOUR, Output, note_written, print_report
from mhacli.cli.parameters import command, offers
from mhacli.errors import UsageError
from mhacli.io.files import check_target, describe, write_whole
from mhacli.settings import ALL, OUTPUT, TEXT, TOKENIZER, TOKENIZERS, TOP, VIEW, Config, Punctuation, Source, setting
from mhacli.text.escape import token_label

if TYPE_CHECKING:
    from collections import Counter

    from rich.console import RenderableType

    from mhacli.render.base.options import Screen
    from mhacli.text.tokenizers import Tokenizer
    from mhacli.text.vocabulary import Entry

DEFAULT_MAX_BYTES = 100 << 20
MAX_ROWS = 24
_LEAST_ROOM = 5


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """The part of the vocabulary to print."""

    top: int | None = setting(
        None,
        OUTPUT,
        "Show only the K most frequent tokens, most frequent first.",
        TOP,
        low=1,
        high=10**9,
        metavar="K",
        common=True,
    )
    all: bool = setting(False, VIEW, ALL, "--all")


VocabularyOutput = Annotated[
    Output, offers("json", "force", *COLOUR, save="Save the whole vocabulary in this file, for --vocab.")
]


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How texts are cut into tokens."""

    tokenizer: str = setting("word", TEXT, TOKENIZER, words=TOKENIZERS, common=True)
    keep_case: bool = setting(False, TEXT, "Keep capital letters.", "--keep-case/--lower-case", default="--lower-case")
    punctuation: Punctuation = setting("drop", TEXT, "Drop punctuation, or keep each mark as a token.")


@examples(
    "mha vocab --file poem.txt --top 20",
    "mha vocab --file poem.txt --save vocabulary.json",
)
@command()
def vocab(source: Source, tokens: Tokenization, options: VocabularyOptions, output: VocabularyOutput) -> None:
    """Counts the tokens of the texts and prints the vocabulary."""
    from collections import Counter

    from mhacli.cli.source import decoding_of, source_paths, typed_texts
    from mhacli.text import vocabulary as vocabularies
    from mhacli.text.encode import make_tokenizer
    from mhacli.text.reading import stream_text

    if source.lines:
        raise UsageError("--lines changes nothing in a vocabulary", hint="leave out --lines")
    config = Config(tokenizer=tokens.tokenizer, keep_case=tokens.keep_case, punctuation=tokens.punctuation)
    if output.save is not None:
        check_target(output.save, force=output.force)
    paths = source_paths(source)
    tokenizer, decoding = make_tokenizer(config, source.max_token_len), decoding_of(source, DEFAULT_MAX_BYTES)
    texts = [("the text", iter([text])) for text in typed_texts(source, decoding)]
    texts += [(describe(path), stream_text(path, decoding)) for path in paths]
    counts: Counter[str] = Counter()
    with show_activity("counting"):
        for name, pieces in texts:
            counts.update(_counted(tokenizer, name, pieces))
    rows = vocabularies.entries(counts, tokenizer.vocabulary, of_bytes=config.tokenizer == "byte")
    if output.save is not None:
        write_whole(output.save, vocabularies.to_json(rows, config.tokenizer).encode(), force=output.force)
    if options.top is not None:
        rows = sorted(rows, key=lambda row: (-row.count, row.id))[: options.top]

    def view(on: Screen) -> RenderableType:
        everything = options.all or options.top is not None
        return vocabulary_table(rows, len(counts), counts.total(), everything=everything, on=on)

    print_report(output, view=view, json=lambda: [vocabularies.to_json(rows, config.tokenizer)])
    note_written(output)


def _counted(tokenizer: Tokenizer, name: str, pieces: Iterable[str]) -> Counter[str]:
    """The count of each token in a text given in pieces. Raises `MhaError`, with the reason, for a text without tokens."""
    from mhacli.text.encode import no_tokens

    is_blank = True

    def observed_pieces() -> Iterator[str]:
        nonlocal is_blank
        for piece in pieces:
            is_blank = is_blank and piece.isspace()
            yield piece

    counts = tokenizer.count(observed_pieces())
    if not counts:
        raise no_tokens(tokenizer, name, is_blank=is_blank)
    return counts


def vocabulary_table(
    rows: Sequence[Entry], n_distinct: int, n_tokens: int, *, everything: bool, on: Screen
) -> RenderableType:
    """Token, id, count and bytes; the first and last rows of a long vocabulary. The caption counts all tokens."""
    from rich.console import Group
    from rich.text import Text

    from mhacli.render.base.format import count_of, fitted, left_out, plain_table
    from mhacli.render.base.options import balanced

    table = plain_table()
    table.add_column("id", justify="right")
    table.add_column("token", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("bytes", justify="right")
    room = max(_LEAST_ROOM, on.width - _numbers_width(rows))
    shown = balanced(len(rows), len(rows) if everything else MAX_ROWS)
    for place, index in enumerate(shown.shown):
        if shown.hidden and place == shown.before:
            table.add_row("⋮", left_out(shown.hidden))
        row = rows[index]
        name = fitted(token_label(row.token), room)
        table.add_row(str(row.id), Text(name, style="bold"), f"{row.count:,}", str(row.bytes))
    caption = f"{count_of(n_tokens, 'token')}, {n_distinct} distinct"
    return Group(Text(caption, style="bold"), table)


def _numbers_width(rows: Sequence[Entry]) -> int:
    ids = max(len("id"), *(len(str(row.id)) for row in rows))
    counts = max(len("count"), *(len(f"{row.count:,}") for row in rows))
    sizes = max(len("bytes"), *(len(str(row.bytes)) for row in rows))
    return ids + counts + sizes + 3 * 2
