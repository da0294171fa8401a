"""Finds the tensors of an attention in a checkpoint by their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mhacli.checkpoints.families import TOWERS, Layout, expected_shapes, require_fitting_heads
from mhacli.errors import MhaError, UsageError
from mhacli.io.safetensors import shown_name
from mhacli.models.folder import Checkpoint, StoredTensor
from mhacli.models.sizes import ProjectionSizes

_LANGUAGE = ("language_model.", "text_model.")
_MEANINGS: Mapping[str, str] = {
    "q_norm": "it normalises queries before the dot product",
    "k_norm": "it normalises keys before the dot product",
    "q_ln": "it normalises queries before the dot product",
    "k_ln": "it normalises keys before the dot product",
    "sinks": "it adds a learned score to every softmax",
    "relative_attention_bias": "it adds a learned score for each distance",
    "pos_key_proj": "it scores keys by distance",
    "pos_query_proj": "it scores queries by distance",
    "LayerNorm": "it normalises what comes after the output",
    "layer_norm": "it normalises what comes after the output",
    "bias_k": "it is a learned key that every query sees",
    "bias_v": "it is the value of a learned key",
}
_MOST_LISTED = 8


@dataclass(frozen=True)
class FoundLayer:
    """One attention in a checkpoint: its prefix, its tensors by their names in the layout, and other tensors of the
    prefix."""

    prefix: str
    tensors: Mapping[str, StoredTensor]
    unused: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the parts of the attention that mha's layer does not have."""
        lines = []
        for name in self.unused[:_MOST_LISTED]:
            why = next((meaning for part, meaning in _MEANINGS.items() if part in name.split(".")), None)
            lines.append(f"{name} is not part of the layer" + (f": {why}" if why else ""))
        more = len(self.unused) - _MOST_LISTED
        return tuple(lines) + ((f"{more} more tensors of the prefix are not part of the layer",) if more > 0 else ())


def stacks_in(checkpoint: Checkpoint, layout: Layout) -> tuple[str, ...]:
    """The stacks of a layout with at least one layer in the checkpoint."""
    return tuple(stack for stack in layout.stacks if layers_in(checkpoint, layout, stack))


def layers_in(checkpoint: Checkpoint, layout: Layout, stack: str) -> tuple[int, ...]:
    """The numbers of a stack's layers; (0,) if the names have no number."""
    for stem in layout.stacks[stack].stems:
        before, counts, after = _dotted(stem + layout.qkv[0]).partition("{layer}")
        number = r"(\d{1,6})" if counts else "()"
        pattern = re.compile(rf"(?:.*\.)?{re.escape(before)}{number}{re.escape(after)}", re.DOTALL)
        layers = {int(match[1] or 0) for name in checkpoint.tensors if (match := pattern.fullmatch(_dotted(name)))}
        if layers:
            return tuple(sorted(layers))
    return ()


def find_layer(
    checkpoint: Checkpoint, layout: Layout, layer: int, *, stack: str | None = None, prefix: str | None = None
) -> FoundLayer:
    """The tensors of one attention. Raises `MhaError` if tensors are missing or several attentions match."""
    where = (
        prefix if prefix is not None else _prefix(checkpoint, layout, layer, chosen_stack(checkpoint, layout, stack))
    )
    dotted = _dotted(where)
    under = {
        _dotted(name)[len(dotted) :]: tensor
        for name, tensor in checkpoint.tensors.items()
        if _dotted(name).startswith(dotted)
    }
    needed = (*layout.qkv, layout.out)
    missing = [where + name for name in needed if _dotted(name) not in under]
    if missing:
        raise MhaError(
            f"{checkpoint.path} lacks tensors of layout {layout.name} under {shown_name(where)}: "
            f"{', '.join(map(shown_name, missing))}",
            code="bad-file",
            path=checkpoint.path,
        )
    names = (*needed, *(name for name in (*layout.qkv_bias, layout.out_bias) if name))
    tensors = {name: under[_dotted(name)] for name in names if _dotted(name) in under}
    unknown = under.keys() - {_dotted(name) for name in names}
    unused = sorted(name for name in unknown if under[name].is_parameter)
    return FoundLayer(where, tensors, tuple(unused))


def chosen_stack(checkpoint: Checkpoint, layout: Layout, stack: str | None) -> str:
    """The stack to read. Raises `UsageError` if the layout lacks it, or if several exist and none is chosen."""
    if stack is not None and stack not in layout.stacks:
        raise UsageError(f"--stack {stack} is not in layout {layout.name}, which has {', '.join(layout.stacks)}")
    stacks = stacks_in(checkpoint, layout) if stack is None else (stack,)
    if len(stacks) > 1 and "self" not in stacks:
        raise UsageError(f"{checkpoint.path} has several stacks: {', '.join(stacks)}", hint=f"add --stack {stacks[0]}")
    return stacks[0] if stacks else next(iter(layout.stacks))


def require_shapes(layer: FoundLayer, layout: Layout, sizes: ProjectionSizes, path: str) -> None:
    """Raises `MhaError`, with all mismatches, unless the shapes are those that follow from the config's sizes."""
    require_fitting_heads(layout, sizes)
    shapes = expected_shapes(layout, sizes)
    expected = {**shapes.weights, **shapes.biases}
    faults = [
        f"{layer.prefix}{name} is {list(tensor.shape)}, not {list(expected[name])}"
        for name, tensor in layer.tensors.items()
        if tensor.shape != expected[name]
    ]
    if faults:
        heads = f"{sizes.n_heads} heads, {sizes.n_kv_heads} kv heads, d_head {sizes.d_head}, d_model {sizes.d_model}"
        raise MhaError(
            f"{path} has tensors of other sizes than its config gives ({heads}): {'; '.join(faults)}",
            code="bad-file",
            path=path,
        )


def sizes_from_shapes(layer: FoundLayer, layout: Layout, given: Mapping[str, int]) -> ProjectionSizes:
    """The sizes of a layer without a config, from the command line and, as far as possible, from shapes.

    Raises `UsageError` if `n_heads` is needed and not given: only the layout `kernels` has a head axis.
    """
    shapes = {name: tensor.shape for name, tensor in layer.tensors.items()}
    first, out = shapes[layout.qkv[0]], shapes[layout.out]
    if layout.order == "kernels":
        if not all(len(shapes[name]) == 3 for name in (*layout.qkv, layout.out)):
            raise MhaError(
                f"{layer.prefix}{layout.qkv[0]} has the shape {list(first)}, not [d_model, head, d_head]",
                code="bad-file",
            )
        kv, d_v = shapes[layout.qkv[1]][1], shapes[layout.qkv[2]][2]
        return ProjectionSizes(first[1], kv, first[2], d_v, out[2], first[0])
    if len(first) != 2 or len(out) != 2:
        raise MhaError(f"{layer.prefix}{layout.qkv[0]} is not a matrix: its shape is {list(first)}", code="bad-file")
    if "n_heads" not in given:
        raise UsageError("the number of heads is not known: there is no config.json", hint="add --heads N")
    n_heads = given["n_heads"]
    rows, d_input = first[::-1] if layout.transposed else first
    d_model, z_width = out[::-1] if layout.transposed else out
    d_v = max(1, z_width // n_heads)
    if len(layout.qkv) == 3:
        d_head = given.get("d_head", max(1, rows // n_heads))
        n_kv = given.get("n_kv_heads", max(1, shapes[layout.qkv[1]][0] // d_head))
        return ProjectionSizes(n_heads, n_kv, d_head, max(1, shapes[layout.qkv[2]][0] // n_kv), d_model, d_input)
    d_head = given.get("d_head", d_v)
    n_kv = given.get("n_kv_heads", max(1, (rows - n_heads * d_head) // max(1, 2 * d_head)))
    return ProjectionSizes(n_heads, n_kv, d_head, d_head, d_model, d_input)


def find_table(names: Collection[str], suffixes: tuple[str, ...], stack: str | None) -> str | None:
    """The tensor of a table (embedding, learned positions): the only match of the first suffix that has one."""
    for suffix in suffixes:
        ending = suffix.format(tower=TOWERS.get(stack or "", ""))
        matches = [name for name in names if name == ending or name.endswith(f".{ending}")]
        matches = _of_language(matches) if len(matches) > 1 else matches
        if len(matches) == 1:
            return matches[0]
    return None


def _prefix(checkpoint: Checkpoint, layout: Layout, layer: int, stack: str) -> str:
    for stem in layout.stacks[stack].stems:
        ending = stem.format(layer=layer) + layout.qkv[0]
        prefixes = [
            name[: len(name) - len(layout.qkv[0])]
            for name in checkpoint.tensors
            if _dotted(name) == _dotted(ending) or _dotted(name).endswith("." + _dotted(ending))
        ]
        if "{layer}" not in stem and len(prefixes) > 1:
            prefixes = [prefix for prefix in prefixes if re.search(rf"(^|[./_]){layer}[./]", prefix)] or prefixes
        prefixes = _of_language(prefixes) if len(prefixes) > 1 else prefixes
        if len(prefixes) > 1:
            raise UsageError(
                f"{checkpoint.path} has several prefixes: {', '.join(map(shown_name, prefixes[:_MOST_LISTED]))}",
                hint=f"add --prefix {prefixes[0]}",
            )
        if prefixes:
            return prefixes[0]
    raise _not_found(checkpoint, layout, layer, stack)


def _not_found(checkpoint: Checkpoint, layout: Layout, layer: int, stack: str) -> MhaError:
    have = layers_in(checkpoint, layout, stack)
    if have:
        span = f"{have[0]} to {have[-1]}" if have == tuple(range(have[0], have[-1] + 1)) else ", ".join(map(str, have))
        return UsageError(f"--layer {layer} is not in {checkpoint.path}, which has {span}")
    place = layout.stacks[stack]
    names = sorted(checkpoint.tensors)
    shown = ", ".join(map(shown_name, names[:_MOST_LISTED])) + (" …" if len(names) > _MOST_LISTED else "")
    return MhaError(
        f"{checkpoint.path} has no tensors of layout {layout.name} such as "
        f"{place.home}{place.stems[0].format(layer=layer)}{layout.qkv[0]}: it has {shown or 'no tensor'}",
        hint="--layout NAME names the layout of the tensors",
        code="bad-file",
        path=checkpoint.path,
    )


def _of_language(candidates: list[str]) -> list[str]:
    """The candidates in the language model of a multimodal model, or all if there are none."""
    return [name for name in candidates if any(part in name for part in _LANGUAGE)] or candidates


def _dotted(name: str) -> str:
    """The name with dots in place of the slashes of Keras and Flax."""
    return name.replace("/", ".")
