"""The kind and number of each attention, by the names of the model's modules, and what a config
says about a model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from mhacli.attention.core import dtype_name
from mhacli.errors import UsageError
from mhacli.models import foreign
from mhacli.record.checks import TOLERANCES
from mhacli.record.record import Model, NonAttentionLayer
from mhacli.settings import AttentionKind

from .folder import size_of

FROM_PYTHON = "mhacli.inspecting inspects any model while you call it from Python"
LayerKey = tuple[AttentionKind, int]
"""The kind of an attention and the number of its layer."""
_ATTENTION = re.compile(r"att(?:n|en)", re.IGNORECASE)
_CROSS = re.compile(r"encdec|encoder_attn|cross", re.IGNORECASE)
_SENSE = re.compile(r"vision|visual|image|video|audio|speech", re.IGNORECASE)
_LANGUAGE = re.compile(r"(^|\.)(language|text)", re.IGNORECASE)


def is_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is or contains an attention, judged by its name."""
    return bool(
        _ATTENTION.search(type(module).__name__) or _ATTENTION.search(name.rpartition(".")[2])
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a module attends to nothing by itself: a list, or a layer of torch without parts."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    return is_list or (type(module).__module__.startswith("torch.") and not any(module.children()))


def is_numbered(name: str) -> bool:
    """Whether a module is one of a list, as layers are."""
    return name.rpartition(".")[2].isdigit()


def is_pair(model: nn.Module) -> bool:
    """Whether a model has an encoder, and a decoder that reads its output."""
    says_so = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return says_so or any(isinstance(module, nn.Transformer) for module in model.modules())


class LayerNumbers:
    """The kind and number of each attention of a model.

    A layer has the number of its module in the outermost list whose members hold at most one
    attention of each kind. Lists of one kind, such as two towers for images, are counted through in
    the order of the model's modules. Only where a pass runs a module again is the number the next
    one after those that ran.
    """

    def __init__(self, model: nn.Module) -> None:
        self._is_pair = is_pair(model)
        attentions = [name for name, part in model.named_modules() if is_attention(name, part)]
        of_lists = [name for name in attentions if _places(name)]
        self._has_language = any(_LANGUAGE.search(_places(name)[0].of_list) for name in of_lists)
        self._has_others = not all(_SENSE.search(_places(name)[0].of_list) for name in of_lists)
        self._crowded = self._crowded_lists(dict(model.named_modules()), attentions)
        lists: dict[str, int] = {}
        for name in of_lists:
            stack, index = self.place(name)
            lists[stack] = max(lists.get(stack, 0), index + 1)
        self._before: dict[str, int] = {}
        totals = Counter[AttentionKind]()
        for name in sorted(
            lists, key=lambda name: bool(_SENSE.search(name)) == self._is_pair
        ):  # texts of a pair first
            kind = self.kind_of(name)
            self._before[name] = totals[kind]
            totals[kind] += lists[name]
        self.begin_pass()

    def _crowded_lists(
        self, modules: Mapping[str, nn.Module], attentions: Sequence[str]
    ) -> frozenset[str]:
        """The lists with a member that holds several attentions of a kind, where a list within it
        tells them apart, as the backbone of a classifier holds layers.
        """
        outermost = dict[str, list[str]]()
        for name in attentions:
            if not name or is_plain(modules[name]):
                continue
            root = next((each for each in outermost if name.startswith(f"{each}.")), name)
            outermost.setdefault(root, []).append(name)
        counts = Counter(
            (place, self.kind_of(within[-1]))
            for root, within in outermost.items()
            for place in _places(root)
        )
        crowded = {place.of_list for (place, _), count in counts.items() if count > 1}
        for root in outermost:
            stacks = [place.of_list for place in _places(root)]
            if crowded.issuperset(stacks):
                crowded -= {*stacks[-1:]}
        return frozenset(crowded)

    def place(self, name: str) -> _ListPlace:
        """The list that numbers the layer of a module, and the number in it; 0 without one."""
        places = (place for place in _places(name) if place.of_list not in self._crowded)
        return next(places, _ListPlace("", 0))

    def is_layer(self, name: str) -> bool:
        """Whether a module is one of a list that numbers layers."""
        return is_numbered(name) and _places(name)[-1].of_list not in self._crowded

    def begin_pass(self) -> None:
        """Forgets which layers ran."""
        self._layers: dict[tuple[bool, int], int] = {}
        self._parts = Counter[tuple[str, int]]()

    def kind_of(self, name: str) -> AttentionKind:
        """The kind of an attention by the name of its module. A model that reads images or sound
        besides text has its layers of text as `self`, the others as `encoder`.
        """
        parts, tail = name.split("."), re.split(r"\.\d+(?=\.|$)", name)[-1]
        half = (
            next((part for part in parts if part in ("encoder", "decoder")), None)
            if self._is_pair
            else None
        )
        if half is None:
            is_main = (
                _LANGUAGE.search(name)
                if self._has_language
                else not (self._has_others and _SENSE.search(name))
            )
            half = "decoder" if is_main else "encoder"
        if half == "encoder":
            return "encoder"
        if _CROSS.search(tail) or (
            self._is_pair and "multihead_attn" in tail
        ):  # the latter is torch's name
            return "cross"
        return "decoder" if self._is_pair else "self"

    def holder_of(self, name: str, modules: Mapping[str, nn.Module]) -> str:
        """The attention around a module of a list or a dict, which computes some of its heads, as
        far as both are in the same layer; empty if there is none.
        """
        if not isinstance(modules[name.rpartition(".")[0]], nn.ModuleList | nn.ModuleDict):
            return ""
        stack, index = self.place(name)
        block = f"{stack}.{index}." if stack else ""
        for around in accumulate(name.split(".")[:-1], "{}.{}".format):
            if f"{around}.".startswith(block) and is_attention(around, modules[around]):
                return "" if is_plain(modules[around]) else around
        return ""

    def next(self, name: str, member: str, block: str, run: int) -> tuple[AttentionKind, int, int]:
        """The kind, the layer and the part of an attention that module `name` computes, or a
        `member` of it, in a `run` of its `block`, the module around it that is a layer.
        """
        kind, (stack, index) = self.kind_of(name), self.place(block)
        key = (kind == "encoder", run)
        taken = {layer for (is_encoder, _), layer in self._layers.items() if is_encoder == key[0]}
        layer = self._before.get(stack, 0) + index
        layer = self._layers.setdefault(key, 1 + max(taken) if layer in taken else layer)
        part = self._parts[member, run]
        self._parts[member, run] += 1
        return kind, layer, part


class _ListPlace(NamedTuple):
    """The name of a list of modules, and the number of one in it."""

    of_list: str
    number: int


def _places(name: str) -> list[_ListPlace]:
    """The place of a module in each list around it, the outermost first.

    >>> [place.of_list for place in _places("encoder.block.2.layer.0.SelfAttention")]
    ['encoder.block', 'encoder.block.2.layer']
    """
    found = re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return [_ListPlace(name[: match.start()], int(match[1])) for match in found]


# --------------------------------------------------------------------------------------- the config


_AFTER_PADDING = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "layoutlmv3",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
_INTERLEAVED = (
    "codegen",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "ernie4_5",
    "glm",
    "glm4",
    "gptj",
    "helium",
)
QUIRKS: Mapping[str, str] = {
    **dict.fromkeys(("bloom", "mpt"), "alibi"),
    **dict.fromkeys(_INTERLEAVED, "rope-interleaved"),
    **dict.fromkeys(_AFTER_PADDING, "positions after padding"),
}
"""What a family does that neither its config nor the names of its modules say: how it encodes
positions; that positions count from after the row for padding."""


def config_of(model: Any) -> Any:
    """The config of a model of transformers; None for other modules."""
    config = getattr(model, "config", None)
    return (
        config if hasattr(model, "main_input_name") and hasattr(config, "get_text_config") else None
    )


def text_config_of(config: Any) -> Any:
    """The part of a config about text, in an encoder-decoder that of the decoder."""
    return config.get_text_config(decoder=True)


def table_length_of(config: Any) -> int:
    """The number of rows of the table of tokens; 0 for a model without a vocabulary."""
    return int(getattr(text_config_of(config), "vocab_size", 0) or 0)


def quirks_of(config: Any) -> str:
    """What is unusual in a family; empty for most."""
    return QUIRKS.get(getattr(config, "model_type", ""), "")


def places_of(config: Any) -> list[LayerKey]:
    """Every attention of a pass by the config; a decoder that reads an encoder has two in each
    layer.
    """
    n = n_layers_of(config)
    counts: dict[AttentionKind, int] = {"self": n}
    if config.is_encoder_decoder:
        counts = {
            "encoder": size_of(config.to_dict(), "n_layers", "encoder") or n,
            "decoder": n,
            "cross": n,
        }
    return [(kind, layer) for kind, count in counts.items() for layer in range(count)]


def n_vocabulary_of(config: Any) -> int:
    """The number of token ids of a model. Raises `UsageError` for a model without a vocabulary."""
    n = table_length_of(config)
    if not n:
        raise UsageError(
            (
                "the model has no vocabulary: it reads images or sound, not text (family"
                f" {config.model_type})"
            ),
            hint=FROM_PYTHON,
        )
    return n


def n_layers_of(config: Any) -> int:
    """The number of layers in a config, in an encoder-decoder that of the decoder; 0 if there is no
    single number.
    """
    n = getattr(text_config_of(config), "num_hidden_layers", 0)
    return n if isinstance(n, int) else 0


def without_attention(
    config: Any, found: Sequence[LayerKey], unfit: Mapping[LayerKey, str]
) -> tuple[NonAttentionLayer, ...]:
    """The layers without a captured attention, with the reason if it is `unfit`, otherwise with
    their type in the config, if there is one. In an encoder-decoder, each kind of attention is
    listed separately.
    """
    types, expected = (), list[LayerKey]()
    if config is not None:
        types = getattr(text_config_of(config), "layer_types", None) or ()
        expected = places_of(config)
    seen = {("self", n) for kind, n in found if kind == "cross"} | {
        *found
    }  # some layers attend to images only
    missing = [
        place for place in dict.fromkeys([*expected, *unfit]) if place not in seen or place in unfit
    ]

    def instead(kind: AttentionKind, n: int) -> str:
        if kind != "self" and config is not None:
            return f"{kind} {unfit.get((kind, n), 'attention, which was not seen')}"
        return unfit.get((kind, n)) or str(types[n] if n < len(types) else "no attention matrix")

    return tuple(NonAttentionLayer(n, instead(kind, n)) for kind, n in missing)


def positions_of(model: Any) -> str:
    """The position encoding of a model, by its parts."""
    config = text_config_of(model.config)
    kinds = {type(module).__name__ for module in model.modules()}
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if getattr(config, "alibi", False) or quirks_of(config) == "alibi":
        return "alibi"  # Falcon has a rotation too, but does not use it
    if any("Rotary" in kind for kind in kinds) or getattr(config, "rotary_dim", None):
        return "rope-interleaved" if quirks_of(config) == "rope-interleaved" else "rope"
    if names & {"relative_attention_bias", "rel_attn"} or getattr(
        config, "relative_attention", False
    ):
        return "relative"
    is_learned = names & {
        "wpe",
        "position_embeddings",
        "embed_positions",
        "position_embedding",
        "positions_embed",
    }
    if is_learned:
        return "learned"
    return "sinusoidal" if hasattr(model, "pos_encoding") else "none"


def most_positions(config: Any) -> int | None:
    """The largest number of positions of a model; None if it has no such limit, as with ALiBi or
    binned distances.
    """
    text = text_config_of(config)
    is_binned = getattr(text, "relative_attention_num_buckets", None) or getattr(
        text, "relative_attention", False
    )
    if is_binned or getattr(text, "alibi", False) or quirks_of(text) == "alibi":
        return None
    n_positions = size_of(text.to_dict(), "positions", "decoder")
    return None if n_positions is None else n_positions - first_position_of(text)


def first_position_of(config: Any) -> int:
    """The index of a text's first position: in some families that after the row for padding."""
    pad = (
        getattr(config, "pad_token_id", None)
        if quirks_of(config) == "positions after padding"
        else None
    )
    return 0 if pad is None else pad + 1


def rope_theta_of(config: Any, layer: int) -> float:
    """The base of the rotary angles of a layer, by its type if types differ; 10000 if the config
    has none.
    """
    text = text_config_of(config)
    types, named = (
        getattr(text, "layer_types", None) or (),
        getattr(text, "rope_parameters", None) or {},
    )
    of_type = named.get(types[layer]) if layer < len(types) else None
    return float((of_type or named).get("rope_theta") or 10_000.0)


def dtype_of(model: Any) -> torch.dtype:
    """The dtype of a model's weights."""
    numbers = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return getattr(model, "dtype", None) or next(numbers, torch.float32)


def entry_of(model: Any, path: str | None = None, revision: str | None = None) -> Model:
    """The entry of a model, of transformers or not, in a record. Without a path it is named as it
    names itself.
    """
    config, name = config_of(model), type(model).__name__
    is_known, dtype = config is not None, dtype_name(dtype_of(model))
    usual = "eager" if is_known else "torch's own functions"
    return Model(
        path=path or getattr(model, "name_or_path", None) or name,
        revision=revision,
        family=config.model_type if is_known else "torch.nn.Module",
        architecture=name,
        implementation=foreign.attn_implementation(config) or usual,
        path_inspected="",
        identical_outputs=None,
        compared_len=0,
        n_layers=n_layers_of(config) if is_known else 0,
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        n_vocabulary=table_length_of(config) if is_known else 0,
        positions=positions_of(model) if is_known else "unknown",
        max_positions=most_positions(config) if is_known else None,
        dtype=dtype if dtype in TOLERANCES else "float32",
    )
