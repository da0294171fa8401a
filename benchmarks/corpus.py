"""Makes a corpus for `mha scan`, with everything that real ones have.

    python benchmarks/corpus.py FILE.jsonl [N_DOCUMENTS] [TEXT ...]

Cuts passages of any length from sample_texts and from the text files named, 3,000 unless a number is given. Every 20th
document is one that came before. Every 10th is hostile: control characters, a word without end, tokens that models give a
meaning, or a line that has no text at all, because it is not UTF-8, not JSON, empty, or larger than `mha scan` takes. The
same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "sample_texts"
TEXTS = [
    "",
    " \n\t",
    "a",
    "\x1b[31mred\x1b[0m \x07\x08 bell",
    "\u202etxet desrever\u202c and \u200bnothing\u200b seen \ufeff",
    "e" + "\u0301" * 300,
    "👨‍👩‍👧‍👦🇩🇪 " * 20,
    "[CLS] a [SEP] b [MASK] <s> c </s> <|endoftext|> [PAD]",
    "word" * 2000,
    "one line\r\n" * 300,
    '{"text": "inside"}',
    "the " * 400,
    "a longer story than any model reads. " * 20_000,
]
"""Hostile documents that have a text, all but the first."""
LINES = [
    b'{"text": "caf\xe9 \xff\xfe"}',
    b"\xff\xfe{\x00}\x00",
    b'{"text": "not closed',
    b'["text"]',
    b'{"body": "another field"}',
    b'{"text": null}',
    b'{"text": 5}',
    b'{"text": "a \\u0000 b"}',
    b'{"text": "half a pair \\ud83d"}',
    b"[" * 50_000,
]
"""Lines that have none."""
HUGE = b'{"text": "' + b"x" * (64 << 20) + b'"}'
"""A line that is too long; a corpus has it once, after the other hostile ones."""


def lines(n_documents: int, texts: Sequence[str]) -> Iterator[bytes]:
    """The lines of the corpus."""
    drawn = random.Random(0)
    hostile = iter([*(_line(text) for text in TEXTS), *LINES, HUGE])
    before: list[bytes] = []
    weights = [len(text) ** 0.5 for text in texts]
    for number in range(n_documents):
        if number % 10 == 7:
            yield next(hostile, None) or drawn.choice([*map(_line, TEXTS[:-1]), *LINES])
        elif number % 20 == 13:
            yield drawn.choice(before)
        else:
            before = [*before[-999:], _line(_passage(drawn, *drawn.choices(texts, weights)))]
            yield before[-1]


def _passage(drawn: random.Random, text: str) -> str:
    """Some characters of a text, often a sentence and seldom some pages, from the begin of a word."""
    length = round(drawn.lognormvariate(5, 1.2))
    start = drawn.randrange(len(text))
    start = text.find(" ", start, start + 100) + 1 or start
    return text[start : start + length] or "."


def _line(text: str) -> bytes:
    return json.dumps({"text": text}).encode()


def main() -> None:
    """Reads the command line and writes the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the JSON lines to write")
    parser.add_argument("n_documents", nargs="?", type=int, default=3000, help="how many lines (default: 3,000)")
    parser.add_argument("texts", nargs="*", type=Path, help="text files from which passages are cut too")
    given = parser.parse_args()
    paths = [*sorted(SAMPLES.glob("*.txt")), *given.texts]
    made = lines(given.n_documents, [path.read_text(encoding="utf-8") for path in paths])
    with open(given.file, "wb") as out:
        out.writelines(line + b"\n" for line in made)


if __name__ == "__main__":
    main()
