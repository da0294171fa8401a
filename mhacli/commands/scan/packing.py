"""Packs the documents of a corpus into texts of equal length, by the tokenizer of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mhacli.commands.scan.request import ScanRequest
from mhacli.errors import UsageError
from mhacli.models.inputs import n_vocabulary_of
from mhacli.models.layer_names import most_positions
from mhacli.models.load import find_checkpoint, load_config
from mhacli.models.tokenizer import ModelTokenizer, load_tokenizer
from mhacli.text.corpus import BadDocument, Document
from mhacli.text.packed import PackedText, pack


@dataclass(frozen=True)
class Packer:
    """Packs documents into texts of `length` tokens; the model puts `n_special` special tokens around each.

    `end_id` is the id of the token between two documents.
    """

    tokenizer: ModelTokenizer
    end_id: int
    length: int
    n_special: int
    n_vocabulary: int

    def packed(self, documents: Iterable[Document | BadDocument]) -> Iterator[PackedText | BadDocument]:
        """The packed texts of a corpus in order. Memory grows with the largest document, not with the corpus."""
        return pack(self._pieces(documents), self.length)

    def _pieces(self, documents: Iterable[Document | BadDocument]) -> Iterator[PackedText | BadDocument]:
        """The tokens of each good document, with the token between two as a piece of its own."""
        name, before = self.tokenizer.names((self.end_id,))[0], None
        for document in documents:
            piece = document if isinstance(document, BadDocument) else self._tokens(document)
            if isinstance(piece, PackedText):
                if before is not None:
                    yield PackedText(before.file, before.place, name, (self.end_id,), ((0, len(name)),), (0,))
                before = document
            yield piece

    def _tokens(self, document: Document) -> PackedText | BadDocument:
        file, place, text = document
        if not text.strip():
            return BadDocument(file, place, "only white space")
        encoding = self.tokenizer.encoding(text, special=False)
        ids = encoding.ids
        if not ids:
            return BadDocument(file, place, "has no tokens")
        if max(ids) >= self.n_vocabulary:
            reason = (
                f"token id {max(ids)} is outside of the vocabulary of the model, which has {self.n_vocabulary} entries"
            )
            return BadDocument(file, place, reason)
        return PackedText(file, place, text, ids, encoding.offsets)


def packer_of(request: ScanRequest) -> Packer:
    """The packer of a request with `pack`. Raises `UsageError` if the model or its tokenizer cannot have such texts."""
    assert request.max_tokens is not None, "a request with `pack` has a length"
    checkpoint, _ = find_checkpoint(request.source, request.revision)
    config, tokenizer = load_config(checkpoint), load_tokenizer(checkpoint, request.tokenizer)
    most, n_special, end_id = most_positions(config), sum(map(len, tokenizer.frame)), tokenizer.end_id
    if end_id is None or end_id >= n_vocabulary_of(config):
        raise UsageError(
            f"--pack needs a token between documents, and the tokenizer of {tokenizer.path} names no end-of-text token and "
            "no separator that the model knows",
            hint="leave out --pack",
        )
    if most is not None and request.max_tokens > most:
        raise UsageError(
            f"--pack makes texts of {request.max_tokens} tokens, more than the {most} positions of {request.source}",
            hint=f"--max-tokens {most} fits",
        )
    if request.max_tokens <= n_special:
        raise UsageError(
            f"--max-tokens {request.max_tokens} leaves no token for a text: the tokenizer puts {n_special} around it",
            hint=f"--max-tokens {n_special + 1} or more",
        )
    return Packer(tokenizer, end_id, request.max_tokens - n_special, n_special, n_vocabulary_of(config))
