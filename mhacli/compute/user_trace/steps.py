"""The steps of a walk through somebody's own attention: one for each line and what it made, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.operations import address_of
from mhacli.adapters.usercode.user_attention import Operation
from mhacli.compute.base.taps import summarise
from mhacli.compute.user_trace.dataflow import Flow, Roles
from mhacli.compute.user_trace.describe import flops_of, formula_of, meaning_of, remark_of
from mhacli.results.record.measures import Parameter, Values
from mhacli.results.record.steps import Step

_GIVEN: Mapping[str, str] = {
    "x": "what attention is asked about: a row of random numbers for each token",
    "context": "other rows, from which keys and values are made",
    "q": "queries, cut into heads, as the function is given them",
    "k": "keys, cut into heads",
    "v": "values, cut into heads",
    "mask": "what says which keys a query may see",
}
_MAX_STEPS = 400


class Walked(NamedTuple):
    """What a walk is told from: the operations of the call, with their sites, places and axes; the tensors that were given,
    with their axes; and what each place that was passed several times was repeated for."""

    flow: Flow
    roles: Roles
    sites: Mapping[int, str]
    places: Sequence[object]
    axes: Mapping[int, tuple[str, ...]]
    given: Sequence[tuple[str, Tensor, tuple[str, ...]]]
    repeated: Mapping[object, str]


def steps_of(walked: Walked, *, values: bool) -> tuple[Step, ...]:
    """The tensors that were given, then a step for each place, in the order in which they were first passed."""
    of_place: dict[object, list[int]] = {}
    for index, place in enumerate(walked.places):
        of_place.setdefault(place, []).append(index)
    steps = [_given_step(name, tensor, axes, values=values) for name, tensor, axes in walked.given]
    steps += [_step(walked, place, indices, values=values) for place, indices in of_place.items()]
    return tuple(steps[:_MAX_STEPS])


def _given_step(name: str, tensor: Tensor, axes: tuple[str, ...], *, values: bool) -> Step:
    return Step(
        site=name,
        axes=axes,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        formula=f"{name} = " + ("True where a query may see a key" if name == "mask" else "N(0, 1) from the seed"),
        meaning=_GIVEN[name],
        layout="copy",
        strides=tuple(tensor.stride()),
        flops=0,
        bytes=tensor.numel() * tensor.element_size(),
        values=_values(tensor) if values else None,
    )


def _step(walked: Walked, place: object, indices: Sequence[int], *, values: bool) -> Step:
    flow, index = walked.flow, indices[0]
    operation, site, axes = flow.operations[index], walked.sites[index], walked.axes[index]
    output = operation.output
    view_of = _view_of(walked, index)
    is_attention = any(one.softmax == index and (one.qk is not None or one.z is not None)
                       for one in walked.roles.attentions)  # fmt: skip
    made_by = flow.made_by[index][0] if flow.made_by[index] else None
    before = () if made_by is None else walked.axes[made_by]
    remark = remark_of(operation, before, axes, is_attention=is_attention)
    return Step(
        site=site,
        axes=axes,
        shape=tuple(output.shape),
        dtype=str(output.dtype).removeprefix("torch."),
        formula=f"{site} = {formula_of(flow, index, walked.sites, walked.axes)}",
        meaning="" if remark else meaning_of(site, axes),
        layout="copy" if view_of is None else "view",
        strides=tuple(output.stride()),
        flops=sum(flops_of(flow, one) for one in indices),
        bytes=sum(flow.operations[one].output.numel() * output.element_size() for one in indices),
        view_of=view_of,
        parameters=tuple(dict.fromkeys(p for one in indices for p in _parameters(flow, one))),
        values=_values(output) if values else None,
        operation=operation.name,
        file=operation.file,
        line=operation.line,
        source=operation.source,
        remark=remark,
        repeats=len(indices),
        repeats_of=walked.repeated.get(place, ""),
    )


def _view_of(walked: Walked, index: int) -> str | None:
    """The first input whose memory an operation's result lies in; what is written into, for what is done in place."""
    operation = walked.flow.operations[index]
    if operation.name == "setitem" or operation.name.endswith("_"):
        return walked.flow.name_of(index, 0, walked.sites)
    address = address_of(operation.output)
    for place, tensor in enumerate(operation.inputs):
        if address and address_of(tensor) == address:
            return walked.flow.name_of(index, place, walked.sites)
    return None


def _parameters(flow: Flow, index: int) -> list[Parameter]:
    """The weights that an operation reads, also where they were turned or cut before."""
    operation: Operation = flow.operations[index]
    if not flow.live[index]:
        return []
    found: list[Parameter] = []
    for place, tensor in enumerate(operation.inputs):
        made = flow.made_by[index][place]
        if id(tensor) in flow.parameters and _is_weight(tensor):
            found.append(Parameter(flow.names[id(tensor)], tuple(tensor.shape)))
        while made is not None and not flow.live[made]:
            first = flow.operations[made].inputs[:1]
            if first and id(first[0]) in flow.parameters and _is_weight(first[0]):
                found.append(Parameter(flow.names[id(first[0])], tuple(tensor.shape)))
            made = flow.made_by[made][0] if flow.made_by[made] else None
    return found


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is learned, which a buffer, such as a triangle of ones, is not."""
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _values(tensor: Tensor) -> Values:
    return summarise(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
