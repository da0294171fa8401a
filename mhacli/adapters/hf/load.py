"""A checkpoint made ready: from a folder, or by its id from a hub, with weights from safetensors alone and no foreign code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mhacli.adapters.hf.library import guarded, offline, transformers
from mhacli.checkpoints.folder import Checkpoint, read_checkpoint
from mhacli.errors import MhaError
from mhacli.io import memory
from mhacli.io.files import format_size
from mhacli.requests.checkpoint import is_hub_id

_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAY_BE_MISSING = re.compile(r"(^|\.)(pooler|classifier|score|qa_outputs|cls|projector)\.")
"""Heads on top of the layers, which no attention depends on: a checkpoint of another task has others."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation on its device, with its checked folder. `revision` is that of a hub, None for a folder."""

    model: Any
    checkpoint: Checkpoint
    source: str
    revision: str | None
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """transformers' own config."""
        return self.model.config

    @property
    def text_config(self) -> Any:
        """The part of it that is about text."""
        return self.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> str:
        """The dtype of its numbers."""
        return str(self.model.dtype).removeprefix("torch.")


def find_checkpoint(source: str, revision: str | None = None) -> tuple[Checkpoint, str | None]:
    """The checked folder that a path or a hub's id names, and the revision of the latter. Raises `MhaError`."""
    if not is_hub_id(source):
        return read_checkpoint(source), None
    transformers()
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=_HUB_FILES)
    except Exception as fault:
        raise MhaError(
            f"model must be a folder that exists, or the id of one on a hub that can be reached, got {source!r}",
            hint=_what_to_type(source, fault),
            code="no-model",
            path=source,
        ) from None
    return read_checkpoint(folder), os.path.basename(os.path.realpath(folder))


def _what_to_type(source: str, fault: Exception) -> str:
    """How a checkpoint is named, and in words what the hub said where it did."""
    named = "give the path of a folder with config.json, as --model ./MiniLM"
    if "/" not in source:
        return f"there is no folder {source} here; {named}, or an id as org/name"
    names = {type(one).__name__ for one in _causes(fault)}
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        return f"the hub has no such checkpoint, or keeps it from you; {named}"
    if "GatedRepoError" in names:
        return "the hub gives it only to those who have accepted its terms: huggingface-cli login"
    return f"the hub could not be reached; {named}"


def _causes(fault: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that it was raised from."""
    while fault is not None:
        yield fault
        fault = fault.__cause__ or fault.__context__


def load_config(checkpoint: Checkpoint) -> Any:
    """transformers' config of a checked folder. Raises `MhaError` for a family that it does not know."""
    library, path = transformers(), checkpoint.path
    with offline():
        config = guarded("config.json", path, lambda: library.AutoConfig.from_pretrained(path, trust_remote_code=False))
    config.return_dict = True  # what a pass gives is read by names, whatever the file says
    return config


def load_model(
    source: str,
    checkpoint: Checkpoint,
    config: Any,
    *,
    revision: str | None,
    device: torch.device,
    dtype: str | None = None,
    head: bool = False,
    allow_nonfinite: bool = False,
) -> Loaded:
    """The model of a checked folder, in its own dtype unless another is asked for; with its language `head` to generate.

    Raises `MhaError` for tensors that are missing or do not fit, numbers that are not finite, and weights that memory cannot
    take.
    """
    library = transformers()
    _require_room(checkpoint, dtype, device)
    path = checkpoint.path
    with offline():
        kind = _auto_class(library, config, head=head)
        model, info = guarded(
            "the config and the weights",
            path,
            lambda: kind.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype) if dtype else "auto",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            ),
        )
    notes = _require_whole(info, path, head=head)
    _own_memory(model)
    if not allow_nonfinite:
        _require_finite(model, path)
    return Loaded(model.to(device).eval(), checkpoint, source, revision, (*checkpoint.notes, *notes))


def _auto_class(library: Any, config: Any, *, head: bool) -> Any:
    if not head:
        return library.AutoModel
    return library.AutoModelForSeq2SeqLM if config.is_encoder_decoder else library.AutoModelForCausalLM


def _require_room(checkpoint: Checkpoint, dtype: str | None, device: torch.device) -> None:
    """Raises `MhaError` before the first tensor, where the weights do not fit. They are held once, and the largest twice."""
    item = None if dtype is None else torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    sizes = [
        t.n_bytes if item is None else t.n_bytes // _DTYPES.get(t.dtype, 1) * item for t in checkpoint.tensors.values()
    ]
    needed = sum(sizes) + max(sizes, default=0)
    have = memory.available_bytes()
    if device.type == "cpu" and not memory.fits(needed, have):
        raise MhaError(
            f"the weights of {checkpoint.path} must fit in the {format_size(have)} that are available, got {format_size(needed)}",
            hint=None if dtype == "bfloat16" else "--dtype bfloat16 takes 2 bytes for each number",
            code="out-of-memory",
            path=checkpoint.path,
        )


def _require_whole(info: Any, path: str, *, head: bool) -> list[str]:
    """Raises `MhaError` where weights of the model are not in the files: they would be random. Returns what to tell.

    With a language `head` nothing may be missing, for it says what is generated.
    """
    missing = sorted(info["missing_keys"])
    needed = [name for name in missing if head or not _MAY_BE_MISSING.search(name)]
    wrong = sorted(f"{name} {list(found)}, not {list(own)}" for name, found, own in info.get("mismatched_keys", ()))
    if needed or wrong:
        raise MhaError(
            f"{path} must hold every tensor of its model, got {'none for' if needed else 'another shape of'} "
            f"{_listed(needed or wrong)}",
            hint="a checkpoint without a language head cannot generate" if head and needed else None,
            code="bad-file",
            path=path,
        )
    return [f"not in the checkpoint, and not used: {_listed(missing)}"] if missing else []


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _own_memory(model: nn.Module) -> None:
    """Copies the weights out of the files that they are mapped from: a map dies with the process where its file is cut."""
    copied: dict[object, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        tensor.data = copied.setdefault(place, tensor.data.clone()) if tensor.numel() else tensor.data


def _require_finite(model: nn.Module, path: str) -> None:
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = ~tensor.isfinite()
            first = bad.nonzero()[0].tolist()
            raise MhaError(
                f"{path}: weights must be finite, got {int(bad.sum())} NaN or Inf in {name}, the first at {first}",
                hint="--allow-nonfinite looks anyway",
                code="not-finite",
                path=path,
            )
