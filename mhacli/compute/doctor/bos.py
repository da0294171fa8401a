"""How often the token that begins a text stands at its beginning, in every way in which a checkpoint's tokenizer makes ids."""

from __future__ import annotations

from collections.abc import Sequence

from mhacli.adapters.hf.library import guarded
from mhacli.adapters.hf.tokenizer import ModelTokenizer
from mhacli.errors import MhaError
from mhacli.results.doctor import HealthCheck
from mhacli.text.chat import Message

_WORD = "word"
_CHAT = (Message("user", _WORD),)


def check_begin(tokenizer: ModelTokenizer | None) -> HealthCheck:
    """Whether a text, a chat, or what was decoded and is encoded again begins with that token twice.

    A template that writes it, for a tokenizer that adds it too, is usual and no fault: chats must then be encoded without
    special tokens, as transformers does itself. That is a caution.
    """
    if tokenizer is None:
        return HealthCheck("bos", None, "there is no tokenizer")
    begin = _begin_id(tokenizer)
    if begin is None:
        return HealthCheck("bos", None, "the tokenizer has no token for the beginning of a text")
    name = tokenizer.library.id_to_token(begin) or f"<{begin}>"
    chat = _chat(tokenizer)
    plain = tokenizer.sequence(_WORD)
    decoded = guarded("the tokenizer", tokenizer.path, lambda: tokenizer.library.decode(list(plain.ids)))
    ways = {
        "an encoded text": _times(plain.ids, begin),
        "a text that was decoded and is encoded again": _times(tokenizer.sequence(decoded).ids, begin),
    }
    if chat is not None:
        ways["a chat in its template"] = _times(tokenizer.sequence(chat, special=False).ids, begin)
    worst = max(ways, key=lambda way: ways[way])
    if ways[worst] > 1:
        return HealthCheck("bos", False, f"{worst} begins with {name!r} {_often(ways[worst])}", ways[worst], 1)
    if chat is not None:
        both = _times(tokenizer.sequence(chat).ids, begin)
        if both > 1:
            message = (
                f"the chat template writes {name!r} and the tokenizer adds it: a chat that is encoded as any text begins "
                "with it twice"
            )
            advice = "encode a rendered chat with add_special_tokens=False, or let apply_chat_template make the ids"
            return HealthCheck("bos", None, message, both, 1, is_caution=True, advice=advice)
    said = "a text and a chat begin" if chat is not None else "a text begins"
    return HealthCheck("bos", True, f"{said} with {name!r} {_often(ways[worst])} at most", ways[worst], 1)


def _often(n: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(n, f"{n} times")


def _times(ids: Sequence[int], begin: int) -> int:
    return next((place for place, i in enumerate(ids) if i != begin), len(ids))


def _begin_id(tokenizer: ModelTokenizer) -> int | None:
    """The token for the beginning, or else the first that the tokenizer puts before a text, such as [CLS]."""
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    framed, bare = tokenizer.sequence(_WORD).ids, tokenizer.sequence(_WORD, special=False).ids
    starts = [place for place in range(len(framed)) if framed[place : place + len(bare)] == bare]
    return framed[0] if starts and starts[0] > 0 else None


def _chat(tokenizer: ModelTokenizer) -> str | None:
    """A message in the checkpoint's template; None where it has none, or one that refuses it."""
    try:
        return tokenizer.chat(_CHAT)
    except MhaError:
        return None
