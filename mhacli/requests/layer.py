"""The request for a run of mha's own layer, resolved before the first tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mhacli.attention.weights_file import LayerFile
from mhacli.errors import UsageError, out_of_range
from mhacli.io import memory
from mhacli.requests.memory import Plan, make_plan, plan_memory
from mhacli.settings import DEFAULT_KEEP_LIMIT, Config
from mhacli.sites import Facts
from mhacli.text.encode import Encoded


@dataclass(frozen=True)
class RecordingOptions:
    """What to record, beyond the config: the arrays to keep, their limit in bytes, and the number of timed runs. `also` are
    arrays to keep besides the usual ones."""

    keep: Sequence[str] | None = None
    keep_limit: int = DEFAULT_KEEP_LIMIT
    repeat: int | None = None
    allow_nonfinite: bool = False
    command: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellIndex:
    """A cell of the pattern by sequence, head, query and key."""

    sequence: int
    head: int
    query: int
    key: int


@dataclass(frozen=True)
class LayerRequest:
    """A text and a resolved config, with the sizes (`facts`) and the `plan` computed from them once.

    `source` gives weights from a file; otherwise they come from the config's seed. `notes` are for the user. Made by
    `layer_request`.
    """

    encoded: Encoded
    config: Config
    facts: Facts
    plan: Plan
    source: LayerFile | None
    options: RecordingOptions
    notes: tuple[str, ...]


def layer_request(
    encoded: Encoded,
    config: Config | None = None,
    *,
    source: LayerFile | None = None,
    options: RecordingOptions = RecordingOptions(),
    notes: tuple[str, ...] = (),
) -> LayerRequest:
    """The request for a run, with its sizes and its plan. The config of a weights file replaces `config`.

    Raises `MhaError` as `make_plan` does. `require_memory` checks whether the run fits into memory.
    """
    resolved = (config or Config()).resolved() if source is None else source.config
    facts = facts_of(encoded, resolved)
    plan = make_plan(facts, options.keep, options.keep_limit, also=options.also)
    return LayerRequest(encoded, resolved, facts, plan, source, options, notes)


def facts_of(encoded: Encoded, config: Config) -> Facts:
    """The sizes of a run, from its text and its resolved config."""
    return Facts.of(config, encoded.sequences, encoded.context, n_tokens=len(encoded.vocabulary.tokens))


def require_memory(request: LayerRequest, available: int | None = None) -> None:
    """Raises `MhaError` as `plan_memory` does. `available` defaults to the memory of this machine."""
    have = memory.available_bytes() if available is None else available
    options = request.options
    plan_memory(request.facts, options.keep, options.keep_limit, have, also=options.also)


def require_no_dropout(config: Config) -> None:
    """Raises `UsageError` in training, because head statistics never build the patterns that dropout acts on."""
    if config.train:
        raise UsageError(
            "--train does not work with mha heads, which never builds the patterns that dropout acts on",
            hint="leave out --train",
        )


def require_inside(cell: CellIndex, request: LayerRequest) -> None:
    """Raises `UsageError` for a cell outside of the pattern."""
    encoded, config = request.encoded, request.config
    if not 0 <= cell.sequence < len(encoded.sequences):
        raise UsageError(out_of_range("--sequence", cell.sequence, len(encoded.sequences)))
    keys = encoded.context or encoded.sequences
    for name, value, count in (
        ("head", cell.head, config.n_heads),
        ("query", cell.query, len(encoded.sequences[cell.sequence].tokens)),
        ("key", cell.key, len(keys[cell.sequence].tokens)),
    ):
        if not 0 <= value < count:
            typed = f"--cell {cell.head},{cell.query},{cell.key}: {name}"
            raise UsageError(out_of_range(typed, value, count))


def decodable(request: LayerRequest, prompt_len: int) -> LayerRequest:
    """The request with the causal mask that decoding implies. Raises `UsageError` for options that contradict decoding."""
    encoded, config, longest = request.encoded, request.config, request.encoded.q_len
    if not 0 <= prompt_len <= longest:
        raise UsageError(
            f"--prompt-len {prompt_len} is out of range: the text has {longest} token{'s' * (longest != 1)}"
        )
    if encoded.context is not None:
        raise UsageError(
            "--context does not work with mha decode, which follows one text", hint="mha run shows cross-attention"
        )
    if config.train:
        raise UsageError(
            "--train does not work with mha decode: with dropout a step differs from the full recomputation",
            hint="leave out --train",
        )
    needed = _prefix_end(config, encoded)
    if needed > prompt_len:
        raise UsageError(
            f"--prompt-len {prompt_len} cuts the prefix of {needed} tokens, which see each other at once",
            hint=f"try --prompt-len {needed}",
        )
    if config.prefix is not None:
        return request
    causal = replace(config, causal=True)
    return replace(request, config=causal, facts=replace(request.facts, config=causal))


def _prefix_end(config: Config, encoded: Encoded) -> int:
    """The end of the last prefix token that an earlier token sees; 0 without one. A step must not split these tokens."""
    end = 0
    for sequence in encoded.sequences:
        first = config.first_column(len(sequence.tokens), encoded.q_len)
        seen = [index for index, place in enumerate(sequence.places) if 1 <= place < (config.prefix or 0)]
        end = max(end, first + seen[-1] + 1) if seen else end
    return end
