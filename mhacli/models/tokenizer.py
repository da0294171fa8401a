"""The tokenizer of a checkpoint: from texts and chats to tokens, and from generated tokens to text."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mhacli.errors import MhaError
from mhacli.io.libraries import guarded
from mhacli.models.folder import Checkpoint
from mhacli.models.load import offline, transformers
from mhacli.settings import PaddingSide
from mhacli.text.spans import Message, Ranges, marked, spans_of_chat
from mhacli.text.tokenizer_file import BYTES, LibraryTokenizer, file_tokenizer
from mhacli.text.tokens import TokenSequence


class ModelTokenizer(LibraryTokenizer):
    """A tokenizer of the library `tokenizers`, with settings of the tokenizer of transformers around it, if there is one."""

    def __init__(self, library: Any, path: str, template: Any = None) -> None:
        super().__init__(library, path)
        self.template = template
        self.side: PaddingSide = "left" if getattr(template, "padding_side", "right") == "left" else "right"
        self.bos_id: int | None = getattr(template, "bos_token_id", None)
        self.pad_id: int | None = getattr(template, "pad_token_id", None)
        self.gives_types = "token_type_ids" in getattr(template, "model_input_names", ["token_type_ids"])

    def beginning(
        self, text: str, limit: int | None, *, special: bool = True, pair: str | None = None
    ) -> tuple[TokenSequence, int]:
        """The first `limit` tokens as the library gives them, with token types if the tokenizer around it gives them."""
        sequence, n_more = super().beginning(text, limit, special=special, pair=pair)
        return sequence if self.gives_types else replace(sequence, token_type_ids=()), n_more

    def begin_warnings(self, sequence: TokenSequence) -> list[str]:
        """Warnings about a text whose beginning-of-text token is doubled, or missing although the tokenizer usually adds it."""
        if self.bos_id is None or not sequence.ids:
            return []
        count = next((i for i, token_id in enumerate(sequence.ids) if token_id != self.bos_id), len(sequence.ids))
        if count > 1:
            times = "twice" if count == 2 else f"{count} times"
            why = "the text or chat template brings one and the tokenizer adds another"
            return [f"the text begins with {sequence.tokens[0]!r} {times}: {why}"]
        if count == 1 or self.bos_id not in self.sequence("a").ids[:1]:
            return []
        return [
            f"the text begins without the beginning-of-text token (id {self.bos_id}), which the model's tokenizer defines "
            "and usually begins with: heads that usually attend to it will attend elsewhere"
        ]

    def pair_warnings(self, sequence: TokenSequence) -> list[str]:
        """A warning about a text that has the separator of two texts inside, but no token types."""
        separator = getattr(self.template, "sep_token_id", None)
        if separator is None or separator not in sequence.ids[:-1]:
            return []
        name = self.token(separator)[0].name
        return [f"the text has {name} inside, and is read as one text: --pair TEXT gives a second text its token types"]

    def continued(self, sequence: TokenSequence, ids: Sequence[int]) -> TokenSequence:
        """The sequence followed by tokens that a model generated."""
        return joined(sequence, self.of_ids(ids))

    def spelled(self, ids: Sequence[int]) -> TokenSequence | None:
        """The tokens of ids, with their text if the tokenizer encodes it to the same ids. None if an id is not in the
        vocabulary."""
        if any(i < 0 or self.library.id_to_token(i) is None for i in ids):
            return None
        text = self.library.decode(list(ids), skip_special_tokens=True)
        again = (self.sequence(text, special=special) for special in (True, False))
        return next((sequence for sequence in again if sequence.ids == tuple(ids)), None) or self.of_ids(ids)

    def chat(self, messages: Sequence[Message]) -> tuple[str, dict[str, Ranges]]:
        """The text of a chat by the checkpoint's template, and the spans of its messages.

        Raises `MhaError` if there is no template, or it refuses the messages or leaves one out.
        """
        if self.template is None or not getattr(self.template, "chat_template", None):
            raise MhaError(
                f"--chat needs a chat template, which {self.path} does not have",
                hint="give the whole text as TEXT or --file, with spans by characters or regular expressions",
                code="no-template",
                path=self.path,
            )
        chats = [[{"role": own.role, "content": own.text} for own in chat] for chat in (messages, marked(messages))]
        render = partial(self.template.apply_chat_template, chats, tokenize=False)
        text, marks = guarded("the chat template", self.path, render)
        return text, spans_of_chat(messages, text, marks)


def joined(first: TokenSequence, second: TokenSequence) -> TokenSequence:
    """Two sequences as one."""
    shift = len(first.text)
    words = max((piece.word for piece in first.pieces if piece.word is not None), default=-1) + 1
    pieces = [replace(p, word=None if p.word is None else p.word + words) for p in second.pieces]
    return TokenSequence(
        first.text + second.text,
        (*first.tokens, *second.tokens),
        (*first.ids, *second.ids),
        (*first.offsets, *((start + shift, end + shift) for start, end in second.offsets)),
        pieces=(*first.pieces, *pieces),
    )


_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""The files from which a tokenizer can be created; without any, transformers would create one without tokens."""


def load_tokenizer(checkpoint: Checkpoint, asked: str | None = None) -> ModelTokenizer:
    """The tokenizer of a checkpoint, or the `asked` one: `byte`, or the path of a `tokenizer.json`. Raises `MhaError`."""
    if asked == "byte":
        return _bytes()
    if asked is not None:
        return ModelTokenizer(file_tokenizer(asked).library, asked)
    library, path, found = transformers(), checkpoint.path, None
    load = partial(library.AutoTokenizer.from_pretrained, path, local_files_only=True, trust_remote_code=False)
    if any(os.path.exists(os.path.join(path, name)) for name in _FILES):
        try:
            with offline():
                found = guarded("the tokenizer", path, load)
        except MhaError:
            if checkpoint.tokenizer is not None:
                raise
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None or not backend.get_vocab_size():
        raise MhaError(
            f"{path} has no usable tokenizer (tokenizer.json, or the files of an older format)",
            hint="--tokenizer FILE takes another tokenizer.json; --tokenizer byte takes the bytes of the text as ids",
            code="no-tokenizer",
            path=path,
        )
    return ModelTokenizer(backend, path, found)


def own_tokenizer(found: Any) -> ModelTokenizer:
    """A copy of a transformers tokenizer in memory. Raises `MhaError` for one without the fast implementation."""
    name = type(found).__name__
    if not hasattr(found, "backend_tokenizer"):
        hint = "transformers.AutoTokenizer.from_pretrained(…) gives one that can be used"
        raise MhaError(f"{name} is not a fast tokenizer of transformers", hint=hint, code="no-tokenizer")
    made = copy.deepcopy(found)
    return ModelTokenizer(made.backend_tokenizer, name, made)


def _bytes() -> ModelTokenizer:
    """The tokenizer whose ids are the bytes of the text, for models without a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.BPE(dict(BYTES), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return ModelTokenizer(library, "byte")


def require_ids(sequences: Sequence[TokenSequence], n_vocabulary: int, path: str) -> None:
    """Raises `MhaError` for an id outside the model's vocabulary: the tokenizer belongs to another model."""
    largest = max(max(sequence.ids) for sequence in sequences)
    if largest >= n_vocabulary:
        raise MhaError(
            f"token id {largest} is outside of the vocabulary of {path}, which has {n_vocabulary} entries",
            hint="use the tokenizer of the model: leave out --tokenizer",
            code="unknown-token",
            path=path,
        )
