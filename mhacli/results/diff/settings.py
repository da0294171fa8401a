"""What two records say differently of how they were made: command, choices, weights, checkpoint, machine, versions."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from mhacli.results.diff.result import Setting
from mhacli.results.record.checkpoint import InspectedLayer
from mhacli.results.record.record import Record

_LAYER_FIELDS = (
    "name", "captured_by", "kernel", "n_heads", "n_kv_heads", "d_head", "d_v", "scale", "softcap", "mask", "bias", "sinks",
    "verified",
)  # fmt: skip
_OF_OTHERS = ("device", "threads", "random")
"""Of the config: what the environment says better, and the shape of what is read."""
_ALIKE = ("dtype", "device", "device name", "seed", "weights", "model", "module", "torch", "mha", "threads")
_MODEL_PLACES = ("path", "compared_len", "identical_outputs", "without", "generated", "dtype")
_SHARED = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_v", "causal", "scale", "softcap")
"""Of the config of a checkpoint, for one beside a layer of our own: of two checkpoints each layer says its own."""
_NONE = "none"


def different_settings(
    a: Record, b: Record, layers: Sequence[tuple[InspectedLayer, InspectedLayer]]
) -> tuple[Setting, ...]:
    """Everything of which the two say something else, the command first."""
    said_a, said_b = _said(a), _said(b)
    names = [*said_a, *(name for name in said_b if name not in said_a)]
    if (a.model is None) != (b.model is None):  # the choices of one are not those of the other
        said_a, said_b = ({**said, **_shared(record)} for said, record in ((said_a, a), (said_b, b)))
        names = [name for name in names if name in said_a and name in said_b]
    found = [Setting(name, said_a.get(name, _NONE), said_b.get(name, _NONE)) for name in names]
    return (*(one for one in found if one.a != one.b), *_of_layers(layers))


def same_settings(a: Record, b: Record) -> tuple[tuple[str, str], ...]:
    """What a reader wants to know of both and that is the same: pairs of a name and a word."""
    said_a, said_b = _said(a), _said(b)
    return tuple(
        (name, said_a[name])
        for name in _ALIKE
        if said_a.get(name) == said_b.get(name) and said_a.get(name, _NONE) != _NONE
    )


def _said(record: Record) -> Mapping[str, str]:
    said: dict[str, object] = {"command": shlex.join(record.command), "kind of record": _kind(record)}
    if record.model is not None:
        model, names = record.model, (f.name for f in dataclasses.fields(record.model))
        said |= {"model": model.path} | {name: getattr(model, name) for name in names if name not in _MODEL_PLACES}
        said |= {"dtype": model.dtype, "padding": record.config.padding}
    else:
        said["weights"] = record.weights
        c, names = record.config, (f.name for f in dataclasses.fields(record.config))
        said |= {name: getattr(c, name) for name in names if name not in _OF_OTHERS}
    if record.module is not None:
        said |= {"module": record.module.target, "called": record.module.called}
        said |= {f"argument {one.name}": one.value for one in record.module.arguments}
    if record.decoding is not None:
        said |= {"cache": record.decoding.cache, "prompt length": record.decoding.prompt_len}
    if record.survey is not None:
        said["kernel"] = record.survey.kernel
    e = record.environment
    said |= {"device": e.device, "device name": e.device_name, "threads": e.threads, "platform": e.platform}
    said |= {"mha": e.mha, "torch": e.torch, "numpy": e.numpy, "python": e.python}
    said["self-check"] = "ok" if record.self_check.ok else "FAILED"
    return {name: _word(value) for name, value in said.items()}


def _shared(record: Record) -> Mapping[str, str]:
    return {name: _word(getattr(record.config, name)) for name in _SHARED}


def _kind(record: Record) -> str:
    if record.module is not None:
        return "a walk of somebody's attention"
    own = "a checkpoint" if record.model is not None else "a layer of our own"
    if record.decoding is not None:
        return f"a decoding of {own}"
    return own if record.survey is None else f"a look at heads of {own}"


def _of_layers(layers: Sequence[tuple[InspectedLayer, InspectedLayer]]) -> tuple[Setting, ...]:
    """What is said differently of layers, each thing once with the layers of which it is said."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for a, b in layers:
        for name in _LAYER_FIELDS:
            words = _word(getattr(a, name)), _word(getattr(b, name))
            if words[0] != words[1]:
                found.setdefault((name, *words), []).append(a.label)
    return tuple(Setting(*said, layers=tuple(labels)) for said, labels in found.items())


def _word(value: object) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(_word, value)) or _NONE
    return str(value)
