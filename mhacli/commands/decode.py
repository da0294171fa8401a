"""`mha decode`: autoregressive decoding with a KV cache, step by step."""

from __future__ import annotations

from typing import Annotated

from mhacli.cli.console import loading_torch, show_activity
from mhacli.cli.help import examples
from mhacli.cli.numbers import Integer
from mhacli.cli.options import (
    VERBOSE,
    VIEW,
    DeviceOptions,
    Everything,
    HeadList,
    LayerOptions,
    Precision,
    SourceOptions,
    TextOptions,
    command,
    number,
    offers,
    option,
    option_group,
    sequence_list,
)
from mhacli.cli.output import COLOUR, PICTURES, SAVED, Output, print_result, save_record, with_output
from mhacli.cli.shared.checkpoint import (
    ComputeRequest,
    GenerateOptions,
    ModelOptions,
    ModelTextOptions,
    model_request,
    require_configured_heads,
    require_one_layer,
    require_without_model,
)
from mhacli.cli.values import counts, index_list
from mhacli.errors import UsageError
from mhacli.io.memory import uncollected
from mhacli.record.heads import HeadsRequest
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.requests.checkpoint import ModelRequest
from mhacli.sites import CacheKind

_DECODING = "Decoding"


@option_group
class DecodeOptions:
    """The prompt, the cache and the view of decoding."""

    prompt_len: Annotated[
        int,
        number(
            _DECODING,
            Integer(0, 10**9),
            "Read the first N tokens in one pass (prefill), then decode.",
            common=True,
        ),
    ] = 0
    cache: Annotated[
        CacheKind, option(_DECODING, "KV-cache strategy to use; all three are timed for comparison.", common=True)
    ] = "preallocated"
    lengths: Annotated[
        str | None,
        option(
            _DECODING,
            "Numbers of tokens at which the caches are compared, such as 64,256,1k. (default: that of the text)",
            common=True,
            metavar="LIST",
        ),
    ] = None
    head: HeadList = None
    sequence: Annotated[str | None, sequence_list()] = None
    precision: Precision = 2
    all: Everything = False
    verbose: Annotated[bool, option(VIEW, VERBOSE, "--verbose")] = False


@examples(
    'mha decode "the cat sat on the mat"',
    'mha decode "the cat sat on the mat" --prompt-len 3 --kv-heads 2',
    'mha decode "the cat sat on the mat" --lengths 64,256,1k',
)
@command
def decode(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    model: ModelOptions,
    generating: GenerateOptions,
    decoding: DecodeOptions,
    output: Annotated[Output, offers("json", *SAVED, *PICTURES, *COLOUR)],
) -> None:
    """Decodes with a layer of mha or a checkpoint and prints the steps."""
    compared = counts(decoding.lengths, "lengths")
    options = with_output(_view_options(decoding), output, keep=output.keep)
    if model.model is not None:
        reading = ModelTextOptions(generate=generating.generate)
        heads = HeadsRequest(allow_nonfinite=layer.allow_nonfinite)
        checkpoint_request = model_request(ComputeRequest(source, text, layer, device, model, reading, output), heads)
        require_configured_heads(options.heads, checkpoint_request)
        _decode_checkpoint(checkpoint_request, options, decoding, output)
        return
    require_without_model(**vars(model), **vars(generating))
    if layer.causal is False:
        raise UsageError("--no-causal does not work with mha decode: later tokens do not exist yet")
    from mhacli.cli.shared.request import make_request, require_cpu_memory, require_heads, save_files
    from mhacli.requests.layer import decodable

    request = make_request(source, text, layer, device, output)
    require_cpu_memory(request)
    request = decodable(request, decoding.prompt_len)
    require_heads(options.heads, request, layer)
    require_choices(request.config.n_heads, len(request.encoded.sequences), options)
    with loading_torch():
        from mhacli.compute.layer import decode as study
    with show_activity("computing"):
        record = study.decode(request, cache=decoding.cache, prompt_len=decoding.prompt_len, lengths=compared)
        save_files(record, request, output)
    print_result(record, request.notes, options=options, output=output)


def _view_options(decoding: DecodeOptions) -> ViewOptions:
    return ViewOptions(
        heads=index_list(decoding.head, "head"),
        sequences=index_list(decoding.sequence, "sequence"),
        precision=decoding.precision,
        everything=decoding.all,
        verbose=decoding.verbose,
    )


def _require_default_cache(decoding: DecodeOptions) -> None:
    """Raises `UsageError` for options of the cache, which only a layer of mha has."""
    if decoding.cache != "preallocated" or decoding.lengths is not None:
        name = "lengths" if decoding.lengths is not None else "cache"
        raise UsageError(f"--{name} does not work with --model, which has its own cache", hint=f"leave out --{name}")


def _decode_checkpoint(request: ModelRequest, options: ViewOptions, decoding: DecodeOptions, output: Output) -> None:
    """Decodes with a checkpoint and its own cache, and prints the steps."""
    _require_default_cache(decoding)
    require_one_layer(request, "mha decode")
    with loading_torch():
        from mhacli.compute.checkpoint.decode import decode_checkpoint
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        prepared, notes = prepare_checkpoint(request)
    with show_activity("computing"):
        record = decode_checkpoint(prepared, decoding.prompt_len)
    save_record(record, output)
    print_result(record, notes, options=options, output=output)
