"""`mha decode`: autoregressive decoding with a KV cache, step by step."""

from __future__ import annotations

from typing import Annotated

from mhacli.cli.console import loading_torch, show_activity
from mhacli.cli.help import examples
from mhacli.cli.output import COLOUR, DRAWING, DRAWN, SAVED, Output, print_result, require_output
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.cli.values import counts
from mhacli.errors import UsageError
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.settings import MAX_LENGTH, Computation, Generation, Reading, setting
from mhacli.sites import CacheKind

_DECODING = "Decoding"
_PROMPT_LEN = "Read the first N tokens in one pass (prefill), then decode."
_CACHE = "KV-cache strategy to use; all three are timed for comparison."
_LENGTHS = "Numbers of tokens at which the caches are compared, such as 64,256,1k. (default: that of the text)"


@examples(
    'mha decode "the cat sat on the mat"',
    'mha decode "the cat sat on the mat" --prompt-len 3 --kv-heads 2',
    'mha decode "the cat sat on the mat" --lengths 64,256,1k',
)
@command(layer_or_model)
def decode(
    what: Computation,
    generation: Generation,
    options: Annotated[ViewOptions, offers("heads", "sequences", "precision", "everything", "verbose", *DRAWING)],
    output: Annotated[Output, offers("json", *SAVED, *DRAWN, *COLOUR)],
    *,
    prompt_len: int = setting(0, _DECODING, _PROMPT_LEN, low=0, high=MAX_LENGTH, common=True),
    cache: CacheKind = setting("preallocated", _DECODING, _CACHE, common=True, modes=("layer",)),
    lengths: str | None = setting(None, _DECODING, _LENGTHS, metavar="LIST", common=True, modes=("layer",)),
) -> None:
    """Decodes with a layer of mha or a checkpoint and prints the steps."""
    from mhacli.cli.source import load_checkpoint, make_run, require_cpu_memory, require_heads, require_one_layer
    from mhacli.run import decodable

    compared = counts(lengths, "lengths")
    require_output(options, output, keep=output.keep)
    if what.given.get("causal") is False:
        raise UsageError("--no-causal does not work with mha decode: later tokens do not exist yet")
    require_one_layer(what.model, "mha decode")
    run = make_run(what, reading=Reading(generate=generation.generate), keep=output.keep, keep_limit=output.keep_limit)
    require_heads(options.heads, run)
    if run.model.path is not None:
        prepared, notes = load_checkpoint(run)
        from mhacli.compute.checkpoint.decode import decode_checkpoint

        with show_activity("computing"):
            record = decode_checkpoint(prepared, prompt_len)
    else:
        require_cpu_memory(run)
        causal, notes = decodable(run, prompt_len), run.notes
        require_choices(run.config.n_heads, len(run.encoded.sequences), options)
        with loading_torch():
            from mhacli.compute.layer import decode as study
        with show_activity("computing"):
            record = study.decode(causal, cache=cache, prompt_len=prompt_len, lengths=compared)
    print_result(record, notes, options=options, output=output, run=run)
