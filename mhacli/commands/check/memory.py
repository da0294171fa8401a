"""The behaviour of a decoder beside what an encoder gives: whether texts read their own memory."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.attention.stages import Inputs
from mhacli.usercode.axes import at_sizes
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.graph import Operation, Watcher
from mhacli.usercode.limits import OutOfTime

from .observed import Answers, Intent, Observed, not_tried, reason_of, seen
from .passes import Passes, relative_distance

_LENGTH = 13
"""The tokens of the texts, a number that is no width."""
_MEMORY = 11
"""The tokens of what stands beside them, another such number."""


class _Decoder(NamedTuple):
    """A decoder of two texts as a function of their memories, and the memories `[text, …]` of a
    length, with other numbers for another seed.
    """

    run: Callable[[Tensor], Tensor]
    memories: Callable[[int, int], Tensor]


def memory(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether the memory of a text, what an encoder gives or reads, changes its outputs and no
    other's, and leaves it an output for each of its own tokens. A memory of another length may be
    refused. A failure that explains others is asked for first: queries of the memory, then outputs
    of the memory, then those of another text, and last a memory that changes nothing.
    """
    decoder = _decoder(passes)
    if decoder is None:
        return not_tried(passes, "it takes none")
    n_tokens = _MEMORY
    refusal = ""
    try:
        output = decoder.run(decoder.memories(n_tokens, 0))
        rows = output.shape[1]
        if passes.attention.is_pooled:  # all it gives for a text, flat
            rows = n_tokens if output.shape[2] == n_tokens * passes.model.n_ids else _LENGTH
    except OutOfTime:
        raise
    except NO_ANSWER as failure:
        if _rows_are_of_memory(decoder):
            return _wrong(passes, "attention takes its queries from the memory, not from the text")
        refusal = f"; a memory of another length: {reason_of(failure)}"
        n_tokens = rows = _LENGTH
    if rows != _LENGTH:
        return _wrong(
            passes, f"a text of {_LENGTH} tokens has as many outputs as its memory, {rows}"
        )
    own = decoder.memories(n_tokens, 0)
    other = decoder.memories(n_tokens, 1)
    before = decoder.run(own)
    after = decoder.run(torch.cat([other[:1], own[1:]]))
    moved, kept = (relative_distance(after[n], before[n]).max().item() for n in (0, 1))
    if kept > passes.tolerance:
        return _wrong(passes, "the outputs of a text follow the memory of another text", kept)
    if moved <= passes.tolerance:
        if passes.too_coarse:
            return not_tried(passes, passes.too_coarse)
        return _wrong(passes, "the memory changes no output")
    after = decoder.run(torch.cat([own[:, :-1], other[:, -1:]], dim=1))
    apart = relative_distance(after[0], before[0])
    if apart[0] <= passes.tolerance < apart[-1]:
        reason = "the first token of a text does not see the end of its memory, and the last does"
        return seen(passes, None, reason + refusal, kept)
    return seen(passes, True, f"each text reads its own memory{refusal}", kept)


def _wrong(passes: Passes, reason: str, largest: float = 0.0) -> Observed:
    """The answer for a memory that is read wrongly."""
    evidence = f"two texts of {_LENGTH} tokens, each beside a memory: {reason}"
    return seen(passes, False, reason, largest, evidence=evidence)


def _decoder(passes: Passes) -> _Decoder | None:
    """The model as a function of memories; None if it takes none."""
    model = passes.model
    attention = passes.attention
    texts = [model.draw(passes.seed + n, _LENGTH) for n in range(2)]
    source = model.source if attention.example is None else None
    source = model.memory or source
    if source is not None:
        of_source = partial(_of_source, passes, source, texts)
        return _Decoder(of_source, partial(_sources, passes, source))
    if model.n_ids or attention.n_rows != 2 or not attention.is_named:
        return None
    if not attention.is_resizable or attention.is_pooled:
        return None

    def run(memories: Tensor) -> Tensor:
        passes.n_passes += 1
        return attention(Inputs(torch.stack(texts), memories), seed=0).double().cpu()

    def memories(length: int, seed: int) -> Tensor:
        return attention.drawer(passes.seed + seed + 2).rows(length, context=True, batch=2)

    return _Decoder(run, memories)


def _of_source(passes: Passes, source: str, texts: list[Tensor], sources: Tensor) -> Tensor:
    """The outputs of texts beside what the encoder reads for each, or gives for it."""
    is_first = passes.attention.axes[0] == "batch"
    given = {source: sources if is_first else sources.transpose(0, 1)}
    return torch.stack([each.output for each in passes.run_pass(*texts, given=given)])


def _sources(passes: Passes, source: str, length: int, seed: int) -> Tensor:
    """Ids for the encoder from those of the first call, or vectors, for two texts."""
    attention = passes.attention
    known: Tensor = at_sizes(attention.others[source], attention.sizes)
    generator = torch.Generator().manual_seed(passes.seed + seed)
    if known.is_floating_point():
        return torch.randn((2, length, known.shape[-1]), generator=generator).to(known)
    chosen = torch.randint(known.numel(), (2, length), generator=generator)
    return known.flatten()[chosen.to(known.device)]


def _rows_are_of_memory(decoder: _Decoder) -> bool:
    """Whether an attention has a query for each token of the memory and a key for each of the text,
    before the call raises.
    """
    watcher = Watcher(None)
    scores = (_MEMORY, _LENGTH)
    with suppress(*NO_ANSWER), watcher:
        decoder.run(decoder.memories(_MEMORY, 0))
    return any(
        operation.output.shape[-2:] == scores or _lengths_of(operation) == scores
        for operation in watcher.operations
    )


def _lengths_of(operation: Operation) -> tuple[int, ...]:
    """The queries and the keys of torch's fused attention; nothing of other operations."""
    if operation.name != "scaled_dot_product_attention":
        return ()
    return tuple(source.output.shape[-2] for source in operation.sources[:2])
