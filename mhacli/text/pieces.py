"""Decodes the tokens of a checkpoint's tokenizer into the characters, bytes and words that they stand for.

Tokenizers spell tokens in various ways: `ĠEiffel`, `▁Eiffel`, `##fel`, `<0xE6>`, `æĹ¥`. Here each token becomes bytes,
and the bytes of neighbours are decoded together as UTF-8, so that a character cut into several tokens is still visible:

- a token is shown as its characters: ` Eiffel`, with its space, and `fel` (`##fel` remains its name);
- a cut character has a mark in each of its tokens, with the part and the number of parts: `日⟨1/3⟩`, `日⟨2/3⟩`, `日⟨3/3⟩`. The
  mark belongs to the character before it: `日⟨2/2⟩本⟨1/2⟩` ends one character and begins another, `日本⟨1/2⟩` has all of 日 and
  the beginning of 本;
- a `⟨` of the text that looks like the beginning of a mark gets a mark itself, `⟨⟨1/1⟩1/3⟩`, so that tokens with different
  characters never look alike;
- a byte that belongs to no character becomes Python's lone surrogate, which `escape.visible` shows as an escape;
- special tokens, and the token for unknown text, keep their names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from mhacli.text.tokens import Piece, TokenSequence


class Encoding(Protocol):
    """The part of `tokenizers.Encoding` that is used here. Every sequence has one entry per token."""

    @property
    def ids(self) -> Sequence[int]:
        """The token ids."""
        ...

    @property
    def tokens(self) -> Sequence[str]:
        """The tokenizer's names of the tokens."""
        ...

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Character ranges of the text, end exclusive; empty for tokens that do not come from the text."""
        ...

    @property
    def special_tokens_mask(self) -> Sequence[int]:
        """1 for special tokens that the tokenizer added; 0 for all others, special tokens in the text included."""
        ...


# ---------------------------------------------------------------------------------------------------------- spellings


def _byte_table() -> dict[str, int]:
    """The character for each byte: printable ones stand for themselves, the others count up from 256.

    Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode` in its encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES: Final = _byte_table()
"""The byte for each character of a byte-level name."""
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer spells its tokens. With all fields unset, a token's name is its text.

    `byte_level`: each character of a name is a byte (GPT-2). `byte_fallback`: `<0xE6>` is a byte. `space` stands for a
    space (`▁`), `prefix` marks the continuation of a word (`##`), `suffix` the end of a word (`</w>`). `added` are the
    ids whose names are plain text, and `special` those of them that are no text. `unknown_id` is the id of unknown
    tokens.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    space: str = ""
    prefix: str = ""
    suffix: str = ""
    added: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    unknown_id: int | None = None
    unknown_name: str = ""

    def bytes_of(self, name: str, token_id: int) -> bytes:
        """The bytes that a token stands for.

        >>> Spelling(byte_level=True).bytes_of("ĠEiffel", 0)
        b' Eiffel'
        """
        fallback = _BYTE_NAME.fullmatch(name) if self.byte_fallback and token_id not in self.added else None
        if fallback is not None:
            return bytes.fromhex(fallback[1])
        if self.byte_level:
            text = name.removesuffix(self.suffix)
            # like the library: a name with any other character is plain text
            if token_id not in self.added and all(character in BYTES for character in text):
                return bytes(BYTES[character] for character in text)
        elif token_id not in self.added:
            text = name.removeprefix(self.prefix).removesuffix(self.suffix)
        else:
            text = name
        text = text.replace(self.space, " ") if self.space else text
        return text.encode("utf-8", "surrogatepass")


def spelling_of(tokenizer_json: Mapping[str, Any]) -> Spelling:
    """The spelling that a `tokenizer.json` declares in its decoder, pre-tokenizer, normalizer and model.

    Nothing is validated, because the tokenizers library reports errors in the file. Names are taken as text where the
    declaration is not understood.
    """
    steps = [step for key in ("decoder", "pre_tokenizer", "normalizer") for step in _steps(tokenizer_json.get(key))]
    kinds = {str(step.get("type")) for step in steps}
    model = _mapping(tokenizer_json.get("model"))
    byte_level = "ByteLevel" in kinds
    entries = tokenizer_json.get("added_tokens")
    added = [_mapping(entry) for entry in entries] if isinstance(entries, list) else []
    by_name = {entry.get("content"): entry.get("id") for entry in added}
    unknown_id, unknown_name = (None, "") if byte_level else _unknown(model, by_name)
    return Spelling(
        byte_level=byte_level,
        byte_fallback=bool(model.get("byte_fallback")) or "ByteFallback" in kinds,
        space=_space_mark(steps),
        prefix=_text(model.get("continuing_subword_prefix")) or _from_step(steps, "WordPiece", "prefix"),
        suffix=_text(model.get("end_of_word_suffix")) or _from_step(steps, "BPEDecoder", "suffix"),
        added=frozenset(entry["id"] for entry in added if isinstance(entry.get("id"), int)),
        special=frozenset(entry["id"] for entry in added if isinstance(entry.get("id"), int) and entry.get("special")),
        unknown_id=unknown_id,
        unknown_name=unknown_name,
    )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of one part of a tokenizer in order, those of nested sequences included."""
    waiting = [part]
    while waiting:
        step = _mapping(waiting.pop())
        if step.get("type") != "Sequence":
            yield step
        for key in ("decoders", "pretokenizers", "normalizers"):
            inner = step.get(key)
            waiting.extend(reversed(inner) if isinstance(inner, list) else ())


def _space_mark(steps: Sequence[Mapping[str, Any]]) -> str:
    for step in steps:
        if step.get("type") == "Metaspace":
            return _text(step.get("replacement"))
        if step.get("type") == "Replace":
            pattern, content = _text(_mapping(step.get("pattern")).get("String")), _text(step.get("content"))
            mark = pattern if content == " " else content if pattern == " " else ""  # in a decoder, in a normalizer
            if len(mark) == 1:
                return mark
    return ""


def _unknown(model: Mapping[str, Any], added: Mapping[Any, Any]) -> tuple[int | None, str]:
    vocabulary, name, number = model.get("vocab"), _text(model.get("unk_token")), model.get("unk_id")
    if name:
        token_id = _mapping(vocabulary).get(name, added.get(name))
        return (token_id, name) if isinstance(token_id, int) else (None, "")
    if isinstance(vocabulary, list) and isinstance(number, int) and 0 <= number < len(vocabulary):
        entry = vocabulary[number]  # a unigram model lists pairs of name and score
        return number, _text(entry[0]) if isinstance(entry, list) and entry else ""
    return None, ""


def _from_step(steps: Sequence[Mapping[str, Any]], kind: str, key: str) -> str:
    return next((_text(step.get(key)) for step in steps if step.get("type") == kind), "")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# ------------------------------------------------------------------------------------------------------------- pieces


class _Part(NamedTuple):
    """A character as a token holds it: whole (1 of 1), or one of the parts into which tokens cut it."""

    character: str
    part: int = 1
    parts: int = 1


class _NamedToken(NamedTuple):
    """A token on its own. `is_named`: it is shown by its name. `after_gap`: white space without a token precedes it."""

    name: str
    bytes: bytes
    is_special: bool
    is_named: bool
    after_gap: bool


_LOOKAHEAD = 16
"""The number of tokens behind the last one that can complete its character or decide its word, with room to spare."""


def pieces_of(text: str, encoding: Encoding, spelling: Spelling, limit: int | None = None) -> TokenSequence:
    """The first `limit` tokens of a text as the text that they stand for, with their names, exact bytes and words.

    For a byte-level tokenizer, the joined bytes of all tokens but special ones are the normalized text. An unknown
    token has the bytes of its part of the text, and belongs to a word. See the top of this module.
    """
    spelled = slice(None if limit is None else limit + _LOOKAHEAD)
    tokens = list(_named_tokens(text, encoding, spelling, spelled))
    parts = _parts([None if token.is_special else token.bytes for token in tokens])
    words = _word_numbers(tokens, parts)
    pieces = [
        Piece(token.name, token.bytes.hex(), token.is_special, word, *_place(token_parts))
        for token, token_parts, word in zip(tokens, parts, words, strict=True)
    ]
    shown = tuple(
        token.name if token.is_named or not token_parts else _shown(token_parts)
        for token, token_parts in zip(tokens, parts, strict=True)
    )
    offsets = tuple((start, end) for start, end in encoding.offsets[:limit])
    return TokenSequence(text, shown[:limit], tuple(encoding.ids[:limit]), offsets, pieces=tuple(pieces[:limit]))


def _named_tokens(text: str, encoding: Encoding, spelling: Spelling, spelled: slice) -> Iterator[_NamedToken]:
    end = 0
    parts = (encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask)
    columns = zip(*(part[spelled] for part in parts), strict=True)
    for token_id, name, (start, stop), mask in columns:
        is_unknown = token_id == spelling.unknown_id and not mask
        is_special = bool(mask) or (token_id in spelling.special and not is_unknown)
        if is_unknown:  # some tokenizers give the text instead of the name
            name, content = spelling.unknown_name or name, text[start:stop].encode("utf-8", "surrogatepass")
        else:
            content = name.encode("utf-8", "surrogatepass") if is_special else spelling.bytes_of(name, token_id)
        yield _NamedToken(
            name, content, is_special, is_special or is_unknown, any(c.isspace() for c in text[end:start])
        )
        end = max(end, stop)


def _parts(chunks: Sequence[bytes | None]) -> list[list[_Part]]:
    """The characters that each token holds, whole or in part. The bytes of neighbours are decoded together; None
    separates."""
    parts: list[list[_Part]] = [[] for _ in chunks]
    run: list[int] = []
    for i, chunk in enumerate([*chunks, None]):
        if chunk is not None:
            run.append(i)
            continue
        owners = [i for i in run for _ in chunks[i] or b""]
        place = 0
        for character in b"".join(chunks[i] or b"" for i in run).decode("utf-8", "surrogateescape"):
            size = len(character.encode("utf-8", "surrogateescape"))
            holders = list(dict.fromkeys(owners[place : place + size]))
            for number, owner in enumerate(holders, start=1):
                parts[owner].append(_Part(character, number, len(holders)))
            place += size
        run = []
    return parts


def _place(parts: Sequence[_Part]) -> tuple[int, int]:
    """The part number and the number of parts of the first cut character in a token; (1, 1) without one."""
    return next(((part.part, part.parts) for part in parts if part.parts > 1), (1, 1))


_LIKE_A_MARK = re.compile(r"⟨(?=[0-9]+/[0-9]+⟩)")


def _shown(parts: Sequence[_Part]) -> str:
    bare = "".join(part.character for part in parts)
    marked = {match.start() for match in _LIKE_A_MARK.finditer(bare)}
    return "".join(
        f"{part.character}⟨{part.part}/{part.parts}⟩" if part.parts > 1 or i in marked else part.character
        for i, part in enumerate(parts)
    )


# -------------------------------------------------------------------------------------------------------------- words


def _word_numbers(tokens: Sequence[_NamedToken], parts: Sequence[Sequence[_Part]]) -> list[int | None]:
    """The number of each token's word, counted from 0; None for special tokens.

    The tokenizer's own words are not used: without a pre-tokenizer the whole text is one word, and others cut `2024`
    and `don't`. The characters decide (see `continues`), including spaces without a token.
    """
    numbers: list[int | None] = []
    stream, begins = _stream(tokens, parts)
    word = -1
    for i, token in enumerate(tokens):
        if token.is_special:
            numbers.append(None)
            continue
        before = parts[i - 1] if i and not tokens[i - 1].is_special else None
        if before is None or not _belongs(parts[i], before, stream, begins[i]):
            word += 1
        numbers.append(word)
    return numbers


def _stream(tokens: Sequence[_NamedToken], parts: Sequence[Sequence[_Part]]) -> tuple[str, list[int]]:
    """All characters, with a space for each gap and each special token, and the index at which each token begins."""
    stream: list[str] = []
    begins: list[int] = []
    for token, token_parts in zip(tokens, parts, strict=True):
        if token.after_gap or token.is_special:
            stream.append(" ")
        begins.append(len(stream))
        stream.extend(part.character for part in token_parts if part.part == 1)
    return "".join(stream), begins


def _belongs(parts: Sequence[_Part], before: Sequence[_Part], stream: str, begin: int) -> bool:
    """Whether a token belongs to the word of the token before it."""
    if not parts or parts[0].part > 1:
        return True
    blank = "".join(part.character for part in before)
    if blank.isspace() and parts[0].character.isspace():  # repeated white space such as empty lines
        return {*blank} == {part.character for part in parts}
    if blank and not blank.strip(" "):
        return True  # a lone space belongs to the next word, as in ` Eiffel`
    return continues(stream, begin)


def words_of(sequence: TokenSequence) -> tuple[range, ...]:
    """The tokens of each word in order: neighbours of one word together, special tokens alone. All tokens are covered.

    Without pieces, as for mha's own tokenizers, each token is a word.
    """
    words = [piece.word for piece in sequence.pieces] or [None] * len(sequence.tokens)
    begins = [i for i, word in enumerate(words) if not i or word is None or word != words[i - 1]]
    return tuple(range(a, b) for a, b in zip(begins, [*begins[1:], len(words)], strict=False))


# ----------------------------------------------------------------------------------------------------------- warnings


def begin_warnings(sequence: TokenSequence, bos_id: int | None, expects_bos: bool | None) -> tuple[str, ...]:
    """Warnings about a text whose beginning-of-text token (`bos_id`) is doubled or missing.

    `expects_bos` says whether the model's tokenizer usually adds the token; None if unknown.
    """
    if bos_id is None or not sequence.ids:
        return ()
    count = next((i for i, token_id in enumerate(sequence.ids) if token_id != bos_id), len(sequence.ids))
    if count > 1:
        times = "twice" if count == 2 else f"{count} times"
        return (
            f"the text begins with {sequence.tokens[0]!r} {times}: "
            "the text or chat template brings one and the tokenizer adds another",
        )
    if count == 0 and expects_bos:
        return (
            f"the text begins without the beginning-of-text token (id {bos_id}), which the model's tokenizer defines and "
            "usually begins with: heads that usually attend to it will attend elsewhere",
        )
    return ()


# --------------------------------------------------------------------------------------------------------- word breaks


_JOINER: Final = "\u200d"
_APOSTROPHES: Final = "'’"
_DECIMALS: Final = ".,"
_SPACELESS: Final = ("CJK ", "HIRAGANA ", "KATAKANA", "HALFWIDTH KATAKANA", "THAI ", "LAO ", "KHMER ", "MYANMAR ")
"""Prefixes of the Unicode names of letters in scripts that put no spaces between words."""


def continues(stream: str, place: int) -> bool:
    """Whether no word ends before the character at `place`.

    Letters and digits make words, also around an apostrophe between letters and a point or comma between digits; marks,
    joiners and skin tones belong to the character before them; other characters are words of their own, with their
    repetitions. In scripts without spaces between words, the tokens are the words.

    Source: Unicode Standard Annex #29, word boundaries WB3c, WB4 to WB7, WB8 to WB12 and WB15, simplified.
    """
    before2, before, after, after2 = (stream[i : i + 1] if i >= 0 else "" for i in range(place - 2, place + 2))
    if not before or before.isspace() or after.isspace():
        return False
    if _extends(after) or before == _JOINER:
        return True
    if _is_letter(before) and _is_letter(after):
        return not (_is_spaceless(before) or _is_spaceless(after))
    for mark, left, right in ((after, before, after2), (before, before2, after)):
        if mark in _APOSTROPHES and _is_letter(left) and _is_letter(right):
            return True
        if mark in _DECIMALS and left.isdigit() and right.isdigit():
            return True
    both = before + after
    return before == after or all("\U0001f1e6" <= c <= "\U0001f1ff" for c in both) or all(map(_is_lone_byte, both))


def _extends(character: str) -> bool:
    skin_tone = "\U0001f3fb" <= character <= "\U0001f3ff"
    return character == _JOINER or skin_tone or unicodedata.category(character).startswith("M")


def _is_letter(character: str) -> bool:
    is_selector = "\ufe00" <= character <= "\ufe0f"  # a mark that belongs to symbols
    return character.isalnum() or (
        character != "" and not is_selector and unicodedata.category(character).startswith("M")
    )


@lru_cache(maxsize=4096)
def _is_spaceless(character: str) -> bool:
    return unicodedata.name(character, "").startswith(_SPACELESS)


def _is_lone_byte(character: str) -> bool:
    return "\udc80" <= character <= "\udcff"
