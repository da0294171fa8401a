"""Which removals settings ask for, as far as a model has what they name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mhacli.errors import UsageError, out_of_range
from mhacli.models.layer_names import LayerKey
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.settings import AttentionKind

from .parts import Attention
from .removal import Removal
from .settings import EffectSettings

Item = tuple[Removal, ...]
"""Parts that are removed together."""


@dataclass(frozen=True)
class RemovalPlan:
    """The removals that settings ask for in a model with these `attentions`, in the order in
    which they run. `position` is the measured one.
    """

    settings: EffectSettings
    request: Run
    record: Record
    attentions: Mapping[LayerKey, Attention]
    position: int

    def items(self) -> list[Item]:
        """The parts to remove. Raises `UsageError` for layers, heads, positions and spans that do
        not exist.
        """
        settings = self.settings
        layers = self._layers()
        if settings.cut is not None:
            return [self._cut(settings.cut, layers)]
        heads = self._heads(layers)
        if not heads:
            raise UsageError("--head and --layer name nothing to remove")
        if not settings.edges:
            return self._whole_heads(heads, layers)
        if settings.heads is None:
            return self._edges([(layer, ()) for layer in layers])
        return self._edges([(layer, (head,)) for layer, head in heads])

    def _layers(self) -> list[LayerKey]:
        """The layers in which something may be removed."""
        for kind, number in self.request.model.layers or ():
            if not any(n == number and kind in (None, known) for known, n in self.attentions):
                raise self._unknown("--layer", (kind, number))
        return [
            (kind, number)
            for kind, number in self.attentions
            if self.request.model.includes(number, kind)
        ]

    def _cut(self, names: tuple[str, str], layers: Sequence[LayerKey]) -> Item:
        """The removal of all weights of the second span on the first, in all layers."""
        spans = {span.name: span.tokens[0] for span in self.record.spans}
        for name in names:
            if not spans.get(name):
                raise UsageError(
                    f"--cut names the span {name!r}, which has no token",
                    hint=f"--span '{name}=/…/' names a part of the text",
                )
        hidden, hidden_from = names
        return tuple(Removal(layer, (), spans[hidden_from], spans[hidden]) for layer in layers)

    def _heads(self, layers: Sequence[LayerKey]) -> list[tuple[LayerKey, int]]:
        """The heads to remove, in the order of the layers."""
        every = [
            (layer, head) for layer in layers for head in range(self.attentions[layer].n_heads)
        ]
        if self.settings.heads is None:
            shown = self.request.statistics.heads
            return [(layer, head) for layer, head in every if shown is None or head in shown]
        kinds = {kind for kind, _ in self.attentions}
        preferred: tuple[AttentionKind, ...] = ("self", "decoder", "cross", "encoder")
        usual = next(kind for kind in preferred if kind in kinds)
        chosen: list[tuple[LayerKey, int]] = []
        for choice in self.settings.heads:
            place = (choice.kind or usual, choice.layer or 0), choice.head
            is_ambiguous = choice.layer is None and len(self.attentions) > 1
            if place not in every or is_ambiguous:
                raise self._unknown("--head", choice)
            chosen.append(place)
        return [place for place in every if place in chosen]

    def _whole_heads(
        self, heads: Sequence[tuple[LayerKey, int]], layers: Sequence[LayerKey]
    ) -> list[Item]:
        """The removals of heads, each alone, and of those that are named, all together."""
        settings = self.settings
        places = () if settings.at is None else (settings.at,)
        n_places = min(len(self.attentions[layer].is_visible) for layer in layers)
        if settings.at is not None and settings.at >= n_places:
            raise UsageError(out_of_range("--at", settings.at, n_places))
        replacement = settings.replace or "zero"
        removals = [Removal(layer, (head,), places, replace=replacement) for layer, head in heads]
        items: list[Item] = [(removal,) for removal in removals]
        if settings.heads is not None and len(removals) > 1:
            items.append(tuple(removals))
        return items

    def _edges(self, heads: Sequence[tuple[LayerKey, tuple[int, ...]]]) -> list[Item]:
        """The removals of the weights from the measured position to each key."""
        settings = self.settings
        is_pair = self.record.context is not None
        of_query = [place for place in heads if place[0][0] != "encoder" or not is_pair]
        if not of_query or (settings.heads is not None and of_query != heads):
            raise UsageError(
                "--edges removes weights of the decoder, not of the encoder",
                hint="decoder.5.1 and cross.5.1 are heads of the decoder, decoder.5 is a layer",
            )
        return [
            (Removal(layer, numbers, (self.position,), (key,)),)
            for layer, numbers in of_query
            for key in range(self.attentions[layer].is_visible.shape[1])
        ]

    def _unknown(self, option: str, place: Sequence[str | int | None]) -> UsageError:
        """The error for a layer or a head that does not exist."""
        has_kinds = len({kind for kind, _ in self.attentions}) > 1
        layers = ", ".join(f"{kind}.{n}" if has_kinds else str(n) for kind, n in self.attentions)
        n_heads = max(each.n_heads for each in self.attentions.values())
        word = ".".join(str(part) for part in place if part is not None)
        return UsageError(
            f"{option} {word} does not exist",
            hint=f"there is attention in the layers {layers}, with {n_heads} heads from 0",
        )
