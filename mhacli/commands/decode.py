"""`mha decode`: autoregressive decoding with a KV cache, step by step."""

from dataclasses import replace
from typing import Annotated

from mhacli.cli.console import progress
from mhacli.cli.output import SAVED, Output, print_result, require_output
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.errors import UsageError, out_of_range
from mhacli.record.sites import CacheKind
from mhacli.render.base.options import ViewOptions
from mhacli.run import Run
from mhacli.settings import MAX_LENGTH, Computation, Reading, setting
from mhacli.text.tokens import Sequences, places_in

_DECODING = "Decoding"


@command(
    'mha decode "the cat sat on the mat"',
    'mha decode "the cat sat on the mat" --prompt-len 3 --kv-heads 2',
    'mha decode "the cat sat on the mat" --cache none',
    modes=layer_or_model,
)
def decode(
    what: Computation,
    reading: Annotated[Reading, offers("generate")],
    options: Annotated[ViewOptions, offers("sequences", "everything")],
    output: Annotated[Output, offers("json", *SAVED)],
    *,
    prompt_len: int = setting(
        0,
        _DECODING,
        "Read the first N tokens in one pass (prefill), then decode.",
        low=0,
        high=MAX_LENGTH,
        common=True,
    ),
    cache: CacheKind = setting(
        "preallocated",
        _DECODING,
        "How a step keeps keys and values: not at all, copied into new tensors, or in memory"
        " allocated at the beginning.",
        common=True,
        modes=("layer",),
    ),
) -> None:
    """Decodes with a layer of mha or a checkpoint and prints the steps."""
    from mhacli.cli.source import make_run, recorded, require_one_layer, start

    require_output(options, output)
    if what.given.get("causal") is False:
        raise UsageError("--no-causal does not work with mha decode: later tokens do not exist yet")
    require_one_layer(what.model, "mha decode")
    run, texts = make_run(what, reading, keep=output.keep, keep_limit=output.keep_limit)
    if run.model.path is None:
        run = _decodable(run, texts[0], prompt_len)
    prepared, notes = start(run, options)
    with progress("computing"):
        if prepared is None:
            from mhacli.layer import steps as of_layer

            record = of_layer.decode(run, texts, cache=cache, prompt_len=prompt_len)
        else:
            from mhacli.models.steps import decode_checkpoint

            record = decode_checkpoint(prepared, prompt_len)
    print_result(recorded(record), notes, options=options, output=output, run=run)


def _decodable(run: Run, sequences: Sequences, prompt_len: int) -> Run:
    """The run with the causal mask that decoding implies. Raises `UsageError` for options that
    contradict decoding.
    """
    config, longest = run.config, run.dims.q_len
    if prompt_len > longest:
        raise UsageError(out_of_range("--prompt-len", prompt_len, longest + 1))
    if run.dims.cross:
        raise UsageError("--context does not work with mha decode, which follows one text")
    if config.train:
        raise UsageError(
            "--train does not work with mha decode: with dropout a step differs from a full"
            " computation"
        )
    # the end of the last token of a prefix that an earlier one sees: a step must not split these
    needed = 0
    for text in sequences:
        first = config.first_column(len(text.ids), longest)
        places = places_in(text.documents, len(text.ids))
        seen = [first + i for i, place in enumerate(places) if 1 <= place < (config.prefix or 0)]
        needed = max([needed, *(column + 1 for column in seen)])
    if needed > prompt_len:
        message = (
            f"--prompt-len {prompt_len} cuts the prefix of {needed} tokens, which see each other at"
            " once"
        )
        raise UsageError(message, hint=f"try --prompt-len {needed}")
    causal = config if config.prefix is not None else replace(config, causal=True)
    return replace(run, dims=replace(run.dims, config=causal))
