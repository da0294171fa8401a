"""The setup of a run: device, weights, ids and mask, from which the same computation can run repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.attention import layer_file as weights
from mhacli.attention import masks
from mhacli.attention.axes import Axes
from mhacli.attention.core import Allowed, Tap, no_tap, visible_cells
from mhacli.attention.devices import choose_device, environment
from mhacli.attention.layer import KeyRows, Places, TokenVectors, run_route
from mhacli.attention.masks import Mask
from mhacli.attention.positions import sinusoidal
from mhacli.attention.scores import ScoredAttention, distance_bias, sum_of_biases, tensor_bias
from mhacli.attention.taps import Capture
from mhacli.attention.weights_file import read_bias_file
from mhacli.errors import bad_file
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.settings import Config
from mhacli.sites import Facts
from mhacli.text.encode import Encoded
from mhacli.text.tokens import TokenSequence

_INPUT_STREAM = 1 << 63
"""Added to the seed for random vectors, so that they differ from the numbers in the weights."""


class Tokens(NamedTuple):
    """The tokens on an axis: their ids, −1 for padding, and their positions in their own texts."""

    ids: Int[Tensor, "batch length"]
    places: Places


class Setup:
    """Everything that a run needs, on its device. `config.device` is the chosen device.

    `queries` are the tokens of the text, and `context` those that keys come from in cross-attention. `random` are the
    vectors that replace embedded tokens, with `config.random`.
    """

    def __init__(self, request: Run) -> None:
        """The weights are those of the request's file, or new ones from the seed. Raises `MhaError` if the device is missing or
        the weights do not fit the vocabulary."""
        encoded, config, facts, source = request.encoded, request.config, request.facts, request.weights
        device, n_tokens = choose_device(config.device), len(encoded.vocabulary.tokens)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if source is None:
            layer = weights.new_layer(config, n_tokens)
        else:
            layer = weights.from_file(source, config, allow_nonfinite=request.allow_nonfinite)
            n_rows = layer.embedding.shape[0]
            if n_rows != n_tokens and config.random is None:
                raise bad_file(
                    source.path,
                    f"the vocabulary has {n_tokens} entries, but embed.weight of {source.path} has {n_rows} rows",
                    hint="--vocab FILE names the vocabulary that the weights were made with",
                )
        self.config, self.facts, self.device = replace(config, device=str(device)), facts, device
        self.layer = layer.to(device)
        self.axes = axes = make_axes(encoded, facts, device)
        self.queries = _tokens(axes.queries, axes.on_queries, facts)
        self.context = None if axes.is_self else _tokens(axes.keys, axes.on_keys, facts)
        self.random = None if config.random is None else _random_rows(config, device)
        self.allowed = make_mask(axes, facts)
        self.bias = None
        if config.score_bias is not None:
            self.bias = _bias(config.score_bias, facts, device, request.allow_nonfinite)

    def record(self, request: Run, **found: Any) -> Record:
        """The record of a request, which says what was asked and where it ran. `found` are the fields of the results."""
        return Record(
            command=request.command,
            config=self.config,
            sequences=request.encoded.sequences,
            context=request.encoded.context,
            vocabulary=request.encoded.vocabulary.tokens,
            environment=environment(self.device, request.config.device),
            weights=None if request.weights is None else request.weights.path,
            **found,
        )

    def capture(self, keep: Collection[str] = (), *, values: bool = False) -> Capture:
        """A tap for a run of this layer."""
        return Capture(self.facts, self.layer.tensors(), keep=keep, values=values)

    def run(self, tap: Tap = no_tap, route: str = "separate") -> Float[Tensor, "batch query d_out"]:
        """The output of one forward pass by a route of `run_route`. Reproducible: dropout starts from the seed."""
        self.layer.attention.generator = torch.Generator(self.device).manual_seed(self.config.seed)
        x, context, places = self.inputs(tap)
        layer, allowed, bias = self.layer.attention, self.allowed, self.bias
        return run_route(route, layer, x, context, allowed=allowed, bias=bias, places=places, tap=tap)

    def attention(self, tap: Tap = no_tap) -> ScoredAttention:
        """The attention of all heads. Queries, keys and values are computed, and no score."""
        x, context, places = self.inputs(tap)
        q, k, v = self.layer.attention.projected(x, context, places=places, tap=tap)
        allowed, bias = self.allowed, None
        if self.config.positions == "alibi":
            key_places = self.queries.places if self.context is None else torch.arange(k.shape[2], device=k.device)
            wide = torch.promote_types(q.dtype, torch.float32)
            bias = distance_bias(self.config.n_heads, self.queries.places, key_places, dtype=wide)
        if self.bias is not None:
            forbids = self.bias.isneginf()
            if bool(forbids.any()):
                allowed = masks.both(*filter(None, [allowed]), masks.from_tensor(~forbids))
            added = tensor_bias(self.bias.masked_fill(forbids, 0.0))
            bias = added if bias is None else sum_of_biases(added, bias)
        scale = self.config.scale or 0.0
        return ScoredAttention(q=q, k=k, v=v, scale=scale, softcap=self.config.softcap, bias=bias, allowed=allowed)

    def inputs(self, tap: Tap = no_tap) -> tuple[TokenVectors, KeyRows | None, Places | None]:
        """The layer's input, its context, and the positions of its tokens (None with a context, which counts from 0)."""
        x = self.rows(self.queries, tap)
        if self.context is None:
            return x, None, self.queries.places
        context = self.rows(self.context)
        tap("context", context)
        return x, context, None

    def rows(self, tokens: Tokens, tap: Tap = no_tap) -> TokenVectors:
        """The vectors of tokens: embedded or random, plus additive positions."""
        rows, added = self.content(tokens, tap), self.added(tokens.places)
        if added is not None:
            tap("positions", added)
            rows = (rows + added).masked_fill((tokens.ids < 0)[..., None], 0.0)
        tap("x", rows)
        return rows

    def content(self, tokens: Tokens, tap: Tap = no_tap) -> TokenVectors:
        """The vectors without positions: rows of the embedding, zeros for padding, or random ones."""
        if self.random is not None:
            tap("random", self.random)
            return self.random
        tap("ids", tokens.ids)
        rows = self.layer.embedding[tokens.ids.clamp(min=0)].masked_fill((tokens.ids < 0)[..., None], 0.0)
        tap("embed", rows)
        return rows

    def added(self, places: Places) -> Float[Tensor, "*#batch length d_input"] | None:
        """The position vectors to add at these positions; None if positions are not additive."""
        if self.config.positions == "sinusoidal":
            return sinusoidal(places, self.facts.size("d_input"), dtype=self.layer.embedding.dtype)
        return self.layer.position_table[places] if self.layer.position_table is not None else None

    def visible(self) -> Bool[Tensor, "#batch #head query key"]:
        """The visible cells: those that the mask allows and the bias does not set to −∞."""
        q_idx, k_idx = (torch.arange(n, device=self.device) for n in (self.facts.q_len, self.facts.k_len))
        cells = visible_cells(self.allowed, q_idx, k_idx, self.bias)
        if cells is None:
            cells = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        return cells.expand(self.facts.batch, -1, len(q_idx), len(k_idx))


def make_axes(encoded: Encoded, facts: Facts, device: torch.device) -> Axes:
    """The texts of a run on the query and key axes."""
    ids = encoded.vocabulary.id_of
    return Axes(
        queries=encoded.sequences,
        keys=encoded.context or encoded.sequences,
        q_len=facts.q_len,
        k_len=facts.k_len,
        side=facts.config.padding,
        is_self=encoded.context is None,
        id_of=lambda word: ids.get(word, -1),
        dtype=facts.config.dtype,
        device=device,
    )


def _tokens(
    texts: Sequence[TokenSequence],
    padded: Callable[[Sequence[Sequence[int]], int], Int[Tensor, "batch length"]],
    facts: Facts,
) -> Tokens:
    """The tokens on an axis, which `padded` fills up. There is one row of positions for all texts if they begin together."""
    ids, places = padded([text.ids for text in texts], -1), padded([text.places for text in texts], 0)
    return Tokens(ids, places if facts.has_separate_positions else torch.arange(ids.shape[1], device=ids.device))


def _random_rows(config: Config, device: torch.device) -> Float[Tensor, "batch query d_input"]:
    """Vectors from the config's distribution: normal with deviation 1, or uniform from 0 to 1."""
    shape = (*(config.random or (1, 1)), config.d_input or config.d_model)
    generator = torch.Generator().manual_seed((config.seed + _INPUT_STREAM) % 2**64)
    draw = torch.randn if config.distribution == "normal" else torch.rand
    return draw(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=getattr(torch, config.dtype))


def _bias(where: str, facts: Facts, device: torch.device, allow_nonfinite: bool) -> Float[Tensor, "..."]:
    """The score bias of a file, in the dtype of scores. −∞ in it means masked; NaN and +∞ are refused."""
    from safetensors.torch import load

    file, name = read_bias_file(where, facts)
    stored = load(file.data)[name]
    bias = stored.to(torch.promote_types(getattr(torch, facts.config.dtype), torch.float32))
    if not allow_nonfinite:  # a number that overflows to −∞ in the dtype is refused too
        weights.require_finite({name: bias.masked_fill(stored.isneginf(), 0.0)}, file.path)
    return bias.to(device)


def make_mask(axes: Axes, facts: Facts) -> Allowed | None:
    """The mask of a run, or None if all cells are allowed.

    A cell is allowed if no rule forbids it: padding of queries and keys, the config's order of positions (causality, a window
    with its sinks, and the prefix that all queries see), and documents.
    """
    config, rules = facts.config, list[Mask]()
    if config.causal or config.prefix is not None:
        rules.append(masks.causal())
    places = _tokens(axes.keys, axes.on_keys, facts).places
    if config.window is not None:
        near = masks.window(*config.window)
        rules.append(near if config.sink is None else masks.either(near, masks.leading(config.sink, places)))
    if config.prefix is not None:
        rules = [masks.either(masks.leading(config.prefix, places), masks.both(*rules))]
    if facts.padded:
        k_lens, q_lens = ([len(text.ids) for text in texts] for texts in (axes.keys, axes.queries))
        rules.append(masks.padding(k_lens, axes.side, padded_len=axes.k_len, of="key"))
        rules.append(masks.padding(q_lens, axes.side, padded_len=axes.q_len, of="query"))
    if facts.packed:
        of_queries = axes.on_queries([text.documents for text in axes.queries], -1)
        rules.append(masks.documents(of_queries, axes.on_keys([text.documents for text in axes.keys], -1)))
    return masks.both(*rules) if rules else None
