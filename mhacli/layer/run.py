"""`mha run`: a text, and the attention of every head over it. A setup has the device, weights, ids
and mask, from which the same computation can run repeatedly; the record is made of one observed
run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load
from torch import Tensor
from torch.nn.functional import linear

from mhacli.attention import masks
from mhacli.attention.axes import Axes, Axis, make_statistics_request
from mhacli.attention.core import Allowed, Tap, no_tap, per_query_head, visible_cells
from mhacli.attention.devices import choose_device, free_bytes
from mhacli.attention.environment import environment
from mhacli.attention.head_statistics import measure, results_of, statistics_of
from mhacli.attention.layer import (
    ROUTES,
    BothPlaces,
    KeyRows,
    LayerWeights,
    Places,
    TokenVectors,
    alibi,
    from_file,
    merge_heads,
    new_layer,
    places_of,
    require_finite_weights,
    sinusoidal,
    to_bytes,
)
from mhacli.attention.reduction import make_baseline
from mhacli.attention.scores import (
    Bias,
    GivenAttention,
    ScoredAttention,
    strongest_key,
    sum_of_biases,
    tensor_bias,
)
from mhacli.attention.taps import (
    Capture,
    Stopwatch,
    largest_difference,
    not_finite,
    require_finite,
    stage_timings,
    time_stages,
    to_array,
)
from mhacli.errors import UsageError, bad_file
from mhacli.io.long_work import Progress, no_progress
from mhacli.record.checks import TOLERANCES, SelfCheck, growth
from mhacli.record.exports import HeadTable
from mhacli.record.record import Record, Step, dims_of
from mhacli.record.sites import Dims, alibi_slopes
from mhacli.record.weights_file import has_embedding, read_bias_file
from mhacli.run import Run, require_memory
from mhacli.settings import Config
from mhacli.text.reading import given_texts
from mhacli.text.tokenizers import encode
from mhacli.text.tokens import Texts

_INPUT_STREAM = 1 << 63
"""Added to the seed for random vectors, so that they differ from the numbers in the weights."""


class Tokens(NamedTuple):
    """The tokens on an axis: their ids, −1 for padding, and their positions in their own texts."""

    ids: Int[Tensor, "batch length"]
    places: Places


class Setup:
    """Everything that a run needs, on its device. `config.device` is the chosen device.

    `queries` are the tokens of the text, and `context` those that keys come from in
    cross-attention. `random` are the vectors that replace embedded tokens, with `config.random`.
    """

    def __init__(self, request: Run, texts: Texts, *, has_matrices: bool = True) -> None:
        """The weights are those of the request's file, or new ones from the seed. Raises `MhaError`
        if the device is missing, if the run, with matrices or without, does not fit into its
        memory, or if the weights do not fit the vocabulary.
        """
        config, dims = request.config, request.dims
        device = choose_device(config.device)
        free, on_gpu = free_bytes(device), device.type != "cpu"
        self.peak_bytes = require_memory(request, free, has_matrices=has_matrices, on_gpu=on_gpu)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.request = request
        self.texts = texts
        self.dims = dims
        self.device = device
        self.config = replace(config, device=str(device))
        self.layer = layer_of(request).to(device)
        self.axes = axes = make_axes(request, texts, device)
        self.queries = _tokens(axes.queries, dims)
        self.context = None if axes.is_self else _tokens(axes.keys, dims)
        self.allowed = mask_of_run(axes, dims)
        self.random: Tensor | None = None
        self.bias: Tensor | None = None
        if config.random is not None:
            shape = (*config.random, config.d_input or config.d_model)
            generator = torch.Generator().manual_seed((config.seed + _INPUT_STREAM) % 2**64)
            draw = torch.randn if config.distribution == "normal" else torch.rand
            drawn = draw(shape, generator=generator, dtype=torch.float64)
            self.random = drawn.to(device=device, dtype=getattr(torch, config.dtype))
        if config.score_bias is not None:
            file, name = read_bias_file(config.score_bias, dims)
            stored = load(file.data)[name]
            bias = stored.to(torch.promote_types(getattr(torch, config.dtype), torch.float32))
            # a number that overflows to −∞ in the dtype is refused too
            if not request.allow_nonfinite:
                require_finite_weights({name: bias.masked_fill(stored.isneginf(), 0.0)}, file.path)
            self.bias = bias.to(device)

    def record(self, **results: Any) -> Record:
        """The record of the texts, which says what was requested and where it ran. `results` are
        the other fields.
        """
        request, (sequences, context) = self.request, self.texts
        return Record(
            command=(),
            config=self.config,
            sequences=sequences,
            context=context,
            vocabulary=request.vocabulary,
            environment=environment(self.device, request.config.device),
            weights=None if request.weights is None else request.weights.path,
            random_embedding=request.weights is not None
            and self.random is None
            and not has_embedding(request.weights),
            **results,
        )

    def run(self, tap: Tap = no_tap, route: str = "separate") -> Float[Tensor, "batch query d_out"]:
        """The output of one forward pass by one of `ROUTES`; `per-head` adds up the outputs of the
        heads. Reproducible: dropout starts from the seed.
        """
        layer = self.layer.attention
        layer.generator = torch.Generator(self.device).manual_seed(self.config.seed)
        q, k, v, at = self.read(tap, route)
        z, _ = layer.attended(q, k, v, at, allowed=self.allowed, bias=self.bias, tap=tap)
        if route != "per-head" or layer.o_proj is None:
            return layer.joined(z, tap)
        # [head, d_v, d_model]
        head_out = z @ layer.o_proj.weight.unflatten(1, (layer.n_heads, layer.d_v)).permute(1, 2, 0)
        tap("head_out", head_out)
        summed: Tensor = head_out.sum(dim=1)
        if layer.o_proj.bias is not None:
            summed = summed + layer.o_proj.bias
        tap("out_sum", summed)
        return summed

    def inputs(self, tap: Tap = no_tap) -> tuple[TokenVectors, KeyRows | None]:
        """The layer's input and its context."""
        x, context = self.rows(self.queries, tap), None
        if self.context is not None:
            context = self.rows(self.context)
            tap("context", context)
        return x, context

    def read(self, tap: Tap, route: str = "separate") -> tuple[Tensor, Tensor, Tensor, BothPlaces]:
        """Queries, keys and values, and the places of queries and keys."""
        layer, (x, context) = self.layer.attention, self.inputs(tap)
        at = places_of(x, context, self.queries.places)
        q, k, v = ROUTES[route](layer, x, context, tap=tap)
        return *layer.rotated(q, k, v, at, tap), at

    def attention(self, tap: Tap = no_tap) -> ScoredAttention:
        """The attention of all heads. Queries, keys and values are computed, and no score."""
        q, k, v, at = self.read(tap)
        allowed, biases = self.allowed, list[Bias]()
        if self.config.positions == "alibi":
            slopes = alibi_slopes(self.config.n_heads)
            q_places, k_places = (each.expand(len(q), -1) for each in at)
            wide = torch.promote_types(q.dtype, torch.float32)

            def distance(batch: int, heads: range, q_idx: Tensor, k_idx: Tensor) -> Tensor:
                places = q_places[batch, q_idx], k_places[batch, k_idx]
                return alibi(slopes[heads.start : heads.stop], *places, dtype=wide)

            biases.append(distance)
        if self.bias is not None:
            forbids = self.bias.isneginf()
            if bool(forbids.any()):
                allowed = masks.both(*filter(None, [allowed]), masks.from_tensor(~forbids))
            biases.append(tensor_bias(self.bias.masked_fill(forbids, 0.0)))
        bias = sum_of_biases(*biases) if biases else None
        scale = self.config.scale or 0.0
        return ScoredAttention(
            q=q, k=k, v=v, scale=scale, softcap=self.config.softcap, bias=bias, allowed=allowed
        )

    def rows(self, tokens: Tokens, tap: Tap = no_tap) -> TokenVectors:
        """The vectors of tokens: embedded or random, plus additive positions."""
        rows, added = self.content(tokens, tap), self.added(tokens.places)
        if added is not None:
            tap("positions", added)
            rows = (rows + added).masked_fill((tokens.ids < 0)[..., None], 0.0)
        tap("x", rows)
        return rows

    def content(self, tokens: Tokens, tap: Tap = no_tap) -> TokenVectors:
        """The vectors without positions: rows of the embedding, zeros for padding, or random
        ones.
        """
        if self.random is not None:
            tap("random", self.random)
            return self.random
        tap("ids", tokens.ids)
        rows = self.layer.embedding[tokens.ids.clamp(min=0)]
        rows = rows.masked_fill((tokens.ids < 0)[..., None], 0.0)
        tap("embed", rows)
        return rows

    def added(self, places: Places) -> Float[Tensor, "*#batch length d_input"] | None:
        """The position vectors to add at these positions; None if positions are not additive."""
        if self.config.positions == "sinusoidal":
            return sinusoidal(places, self.dims.size("d_input"), dtype=self.layer.embedding.dtype)
        return self.layer.position_table[places] if self.layer.position_table is not None else None

    def visible(self) -> Bool[Tensor, "#batch #head query key"]:
        """The visible cells: those that the mask allows and the bias does not set to −∞."""
        q_idx, k_idx = (
            torch.arange(n, device=self.device) for n in (self.dims.q_len, self.dims.k_len)
        )
        cells = visible_cells(self.allowed, q_idx, k_idx, self.bias)
        return cells.expand(self.dims.batch, -1, len(q_idx), len(k_idx))


def layer_of(request: Run) -> LayerWeights:
    """The layer with the weights of a file, or new ones from the seed. Raises `MhaError` if they do
    not fit the vocabulary.
    """
    config, source = request.config, request.weights
    n_tokens = len(request.vocabulary)
    if source is None:
        return new_layer(config, n_tokens)
    layer = from_file(source, config, n_tokens, allow_nonfinite=request.allow_nonfinite)
    n_rows = layer.embedding.shape[0]
    if n_rows != n_tokens and config.random is None:
        raise bad_file(
            source.path,
            (
                f"the vocabulary has {n_tokens} entries, but embed.weight of {source.path} has"
                f" {n_rows} rows"
            ),
            hint="--vocab FILE names the vocabulary that the weights were made with",
        )
    return layer


def make_axes(request: Run, texts: Texts, device: torch.device) -> Axes:
    """The texts of a run on the query and key axes."""
    config = request.config
    ids = {token: i for i, token in enumerate(request.vocabulary)}
    queries = Axis.of(texts.sequences, config.padding, device)
    keys = Axis.of(texts.context or texts.sequences, config.padding, device)
    return Axes(queries, keys, not request.dims.cross, lambda word: ids.get(word, -1), config.dtype)


def mask_of_run(axes: Axes, dims: Dims) -> Allowed | None:
    """The mask of a run, or None if all cells are allowed."""
    return masks.of_run(axes, dims, _tokens(axes.keys, dims).places)


def _tokens(axis: Axis, dims: Dims) -> Tokens:
    """The tokens on an axis. There is one row of positions for all texts if they begin together."""
    places = torch.arange(axis.length, device=axis.device)
    if dims.has_separate_positions:
        places = axis.filled(axis.places, 0).to(axis.device)
    return Tokens(axis.filled(axis.ids, -1).to(axis.device), places)


# --------------------------------------------------------------------------------------------- runs

_BLOCK_CELLS = 1 << 22
_OTHER_NAMES = {"q_per_head": "q", "k_per_head": "k", "v_per_head": "v", "out_sum": "out"}
"""The usual names of sites of other routes."""


@torch.no_grad()
def inspect(
    text: str | Sequence[str] = (),
    config: Config | None = None,
    *,
    context: str | Sequence[str] = (),
) -> Record:
    """The record of one attention layer over the text: tokens, shapes, patterns, statistics,
    timings, self-check.

    `text` is one sequence, several (a padded batch), or nothing with `config.random`. `context`
    makes it cross-attention. The weights come from the config's seed. Raises `MhaError` for errors
    that the user can fix: contradictory sizes, text without tokens, too little memory, numbers that
    overflow.
    """
    if not isinstance(config, Config | None):
        raise UsageError(
            f"config is no mhacli.Config: {config!r:.60}", hint="mhacli.Config(n_heads=2)"
        )
    config = (config or Config()).resolved()
    texts, vocabulary, _ = encode(
        given_texts(() if text is None else text, "mhacli.inspect"),
        config,
        context=given_texts(() if context is None else context, "mhacli.inspect"),
    )
    request = Run(dims=dims_of(config, texts, n_tokens=len(vocabulary)), vocabulary=vocabulary)
    return record_run(Setup(request, texts))[0]


def weights_content(request: Run) -> bytes:
    """The content of a weights file with the weights that `inspect` uses. Raises `MhaError` if they
    are not finite.
    """
    layer = layer_of(replace(request, allow_nonfinite=False))
    return to_bytes(layer, request.config, request.vocabulary)


def record_run(
    setup: Setup, *, route: str = "separate", values: bool = False
) -> tuple[Record, Mapping[str, Tensor]]:
    """The record of one observed run and its repetitions, and the tensors of that run."""
    capture = Capture(setup.dims, setup.layer.tensors(), values=values)
    watch = Stopwatch(setup.device, then=capture)
    setup.run(watch, route)
    return make_record(
        setup,
        capture.steps,
        capture.tensors,
        watch.seconds,
        again=lambda tap: setup.run(tap, route),
    )


def make_record(
    setup: Setup,
    steps: Sequence[Step],
    tensors: Mapping[str, Tensor],
    seconds: Mapping[str, float],
    *,
    again: Callable[[Tap], object],
) -> tuple[Record, Mapping[str, Tensor]]:
    """The record of an observed run with the `seconds` of each site, and of runs `again`. And the
    tensors of that run, on the CPU: those of other routes under the usual names too, the `weights`
    that multiplied the values, and what is `allowed`.

    Raises `MhaError` for numbers that are not finite, and `UsageError` for an array of a site that
    the run does not have.
    """
    request = setup.request
    by_name = {site: tensor.cpu() for site, tensor in tensors.items()}
    by_name |= {_OTHER_NAMES[site]: by_name[site] for site in tensors if site in _OTHER_NAMES}
    if not request.allow_nonfinite:
        require_finite(by_name["qk"], by_name["out"], setup.config.dtype)
    timings = time_stages(again, seconds, setup.device, request.repeat)
    for name in request.keep or ():
        if name not in tensors:
            passed = [step.site for step in steps if step.cache is None] or list(tensors)
            raise UsageError(
                f"--keep: this run does not compute {name}", hint=f"it computes {' '.join(passed)}"
            )
    by_name["weights"] = by_name.get("dropped", by_name["pattern"])
    by_name["allowed"] = setup.visible().cpu()
    allowed, pattern = masks.from_tensor(by_name["allowed"]), by_name["pattern"]
    scores = by_name["scores"]
    attention = GivenAttention(weights=pattern, scores=scores, allowed=allowed, wide=True)
    of_statistics = make_statistics_request(make_axes(request, setup.texts, torch.device("cpu")))
    baseline, run = make_baseline(attention, of_statistics), Run(allow_nonfinite=True)
    measured = measure(attention, of_statistics, baseline=baseline, run=run)
    kept, left_out = request.arrays_to_keep(setup.dims)
    arrays = {
        **{name: by_name[name] for name in kept},
        "allowed": by_name["allowed"],
        "entropy": measured.sums["entropy"],
        "strongest_key": strongest_key(pattern),
    }
    record = setup.record(
        trace=tuple(replace(step, time_s=timings[step.site].median_s) for step in steps),
        heads=HeadTable(results_of([measured])[0].heads),
        timings=timings,
        self_check=_self_check(setup, by_name),
        not_kept=left_out,
        arrays={name: to_array(tensor) for name, tensor in arrays.items()},
    )
    return record, by_name


def _self_check(setup: Setup, tensors: Mapping[str, Tensor]) -> SelfCheck:
    """The error of the output against a recomputation in float64 from the weights shown, in blocks
    that bound the memory. It holds only if the weights of every query that sees a key sum to 1.

    The tolerance is relative to the largest sum of magnitudes behind an output, which bounds its
    rounding.
    """
    weights, out = tensors["weights"], tensors["out"]
    of_layer = setup.layer.tensors()
    projection = (of_layer.get(f"o_proj.{part}") for part in ("weight", "bias"))
    w, b = (None if tensor is None else tensor.cpu().double() for tensor in projection)
    v = per_query_head(tensors["v"], setup.config.n_heads).double()
    block = max(1, _BLOCK_CELLS // (weights.shape[0] * weights.shape[1] * weights.shape[3]))
    error, magnitude = 0.0, 0.0
    for rows, seen in zip(weights.split(block, dim=2), out.split(block, dim=1), strict=True):
        again, sums = (merge_heads(rows.double() @ values) for values in (v, v.abs()))
        if w is not None:
            again, sums = linear(again, w, b), linear(sums, w.abs(), None if b is None else b.abs())
        error = max(error, largest_difference(again, seen))
        magnitude = max(magnitude, torch.nan_to_num(sums, nan=0.0, posinf=0.0).max().item())
    has_keys = tensors["allowed"].any(dim=-1).double()
    excess = tensors["pattern"].sum(dim=-1, dtype=torch.float64) - has_keys
    largest = excess.nan_to_num(nan=0.0).abs().max().item()
    tolerance = TOLERANCES[setup.config.dtype]
    of_sums = min(tolerance.output, TOLERANCES["float32"].output)  # 16 bits are summed in float32
    of_output = tolerance.output + of_sums * (growth(weights.shape[3]) - 1)
    return SelfCheck.of(error, of_output * magnitude, holds=largest <= tolerance.stored_row_sum)


# ------------------------------------------------------------------------- statistics of long texts


@torch.no_grad()
def inspect_heads(request: Run, texts: Texts, report_progress: Progress = no_progress) -> Record:
    """The record of the exact statistics of every head of a long text, without a matrix of queries
    × keys. `report_progress` receives the completed fraction. Raises `MhaError` where the run
    cannot fit, before the first large tensor; where the device is missing; and for numbers that
    overflow.
    """
    config = request.config
    setup, began = Setup(request, texts, has_matrices=False), perf_counter()
    capture = Capture(setup.dims, setup.layer.tensors())
    attention = setup.attention(capture)
    if not attention.is_finite and not request.allow_nonfinite:
        raise not_finite(f"queries, keys or values are NaN or Inf in {config.dtype}", config.dtype)
    of_statistics = make_statistics_request(setup.axes, request.statistics)
    seconds, began = {"projections": perf_counter() - began}, perf_counter()
    report_progress("uniform attention", 0.0)
    baseline = make_baseline(attention, of_statistics)
    heads, arrays, survey, _ = statistics_of(
        attention,
        of_statistics,
        baseline=baseline,
        run=request,
        peak_bytes=setup.peak_bytes,
        report_progress=report_progress,
    )
    seconds["statistics"] = perf_counter() - began
    return setup.record(
        trace=tuple(capture.steps),
        heads=HeadTable(heads),
        timings=stage_timings(seconds, [seconds]),
        self_check=SelfCheck.of_layers([survey.checks]),
        survey=survey,
        arrays=arrays,
    )
