"""`mha decode`: autoregressive decoding with a KV cache, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import loading_torch, show_activity
from mhacli.cli.help import examples
from mhacli.cli.output import COLOUR, DRAWING, DRAWN, SAVED, Output, print_result, require_output, save_files
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.cli.values import counts
from mhacli.commands.run import weights_of
from mhacli.errors import UsageError
from mhacli.io.memory import uncollected
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.settings import MAX_LENGTH, Computation, Generation, Reading, setting
from mhacli.sites import CacheKind

if TYPE_CHECKING:
    from mhacli.record.record import Record
    from mhacli.run import Run

_DECODING = "Decoding"
_PROMPT_LEN = "Read the first N tokens in one pass (prefill), then decode."
_CACHE = "KV-cache strategy to use; all three are timed for comparison."
_LENGTHS = "Numbers of tokens at which the caches are compared, such as 64,256,1k. (default: that of the text)"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The prompt, the cache and the view of decoding."""

    # fmt: off
    prompt_len: int = setting(0, _DECODING, _PROMPT_LEN, low=0, high=MAX_LENGTH, common=True)
    cache: CacheKind = setting("preallocated", _DECODING, _CACHE, common=True, modes=("layer",))
    lengths: str | None = setting(None, _DECODING, _LENGTHS, metavar="LIST", common=True, modes=("layer",))
    # fmt: on


@examples(
    'mha decode "the cat sat on the mat"',
    'mha decode "the cat sat on the mat" --prompt-len 3 --kv-heads 2',
    'mha decode "the cat sat on the mat" --lengths 64,256,1k',
)
@command(layer_or_model)
def decode(
    what: Computation,
    generation: Generation,
    decoding: Decoding,
    options: Annotated[ViewOptions, offers("heads", "sequences", "precision", "everything", "verbose", *DRAWING)],
    output: Annotated[Output, offers("json", *SAVED, *DRAWN, *COLOUR)],
) -> None:
    """Decodes with a layer of mha or a checkpoint and prints the steps."""
    from mhacli.cli.source import make_run, require_one_layer

    compared = counts(decoding.lengths, "lengths")
    require_output(options, output, keep=output.keep)
    if what.given.get("causal") is False:
        raise UsageError("--no-causal does not work with mha decode: later tokens do not exist yet")
    require_one_layer(what.model, "mha decode")
    run = make_run(what, reading=Reading(generate=generation.generate), keep=output.keep, keep_limit=output.keep_limit)
    if run.model.path is not None:
        record, notes = _of_checkpoint(run, options, decoding)
    else:
        record, notes = _of_layer(run, options, decoding, what, compared), run.notes
    save_files(record, output, lambda: weights_of(run))
    print_result(record, notes, options=options, output=output)


def _of_layer(
    run: Run, options: ViewOptions, decoding: Decoding, what: Computation, compared: tuple[int, ...]
) -> Record:
    from mhacli.cli.source import require_cpu_memory, require_heads
    from mhacli.run import decodable

    require_cpu_memory(run)
    run = decodable(run, decoding.prompt_len)
    require_heads(options.heads, run, what.given)
    require_choices(run.config.n_heads, len(run.encoded.sequences), options)
    with loading_torch():
        from mhacli.compute.layer import decode as study
    with show_activity("computing"):
        return study.decode(run, cache=decoding.cache, prompt_len=decoding.prompt_len, lengths=compared)


def _of_checkpoint(run: Run, options: ViewOptions, decoding: Decoding) -> tuple[Record, tuple[str, ...]]:
    """Decodes with a checkpoint and its own cache."""
    from mhacli.cli.source import require_configured_heads

    require_configured_heads(options.heads, run)
    with loading_torch():
        from mhacli.compute.checkpoint.decode import decode_checkpoint
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        prepared, notes = prepare_checkpoint(run)
    with show_activity("computing"):
        return decode_checkpoint(prepared, decoding.prompt_len), tuple(notes)
