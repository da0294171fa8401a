"""What the formulas, counts and shapes of a run depend on, known before its first tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mhacli.spec.config import Config
from mhacli.spec.tokens import TokenSequence


@dataclass(frozen=True)
class Facts:
    """A resolved config, the lengths, and what the text brings: keys from another text (`cross`), sequences shorter than
    others (`padded`), several documents in a row (`packed`), and the size of the vocabulary."""

    config: Config
    batch: int
    q_len: int
    k_len: int
    cross: bool = False
    padded: bool = False
    packed: bool = False
    n_tokens: int = 0

    @staticmethod
    def of(
        config: Config, sequences: Sequence[TokenSequence], context: Sequence[TokenSequence] | None, *, n_tokens: int
    ) -> Facts:
        """The facts of these tokens under a resolved config."""
        families = (sequences, sequences if context is None else context)
        q_len, k_len = (max(len(s.tokens) for s in family) for family in families)
        return Facts(
            config,
            len(sequences),
            q_len,
            k_len,
            cross=context is not None,
            padded=any(len(s.tokens) < n for f, n in zip(families, (q_len, k_len), strict=True) for s in f),
            packed=any(len(set(s.documents)) > 1 for family in families for s in family),
            n_tokens=n_tokens,
        )

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every axis word of the house."""
        config = self.config
        return {
            "batch": self.batch,
            "query": self.q_len,
            "key": self.k_len,
            "head": config.n_heads,
            "kv_head": config.n_kv_heads or config.n_heads,
            "d_head": config.d_head or 0,
            "d_v": config.d_v or 0,
            "d_model": config.d_model,
            "d_input": config.d_input or config.d_model,
        }

    @property
    def input_axis(self) -> str:
        """The word for the width of what the projections read: `d_input` only where it differs from `d_model`."""
        return "d_model" if self.sizes["d_input"] == self.config.d_model else "d_input"

    @property
    def own_places(self) -> bool:
        """Whether sequences count their positions apart: padded on the left, or packed, they do not begin together."""
        return self.packed or (self.padded and self.config.padding == "left")

    def size(self, axis: str) -> int:
        """The size of an axis, where `·` joins words that share it (product) and `+` what lies side by side (sum).

        >>> Facts(Config(d_model=12, n_heads=3, d_head=4), batch=2, q_len=5, k_len=5).size("head·d_head")
        12
        """
        return sum(prod(self.sizes[word] for word in part.split("·")) for part in axis.split("+"))

    def cells(self) -> int:
        """How many (batch, head, query, key) cells there are."""
        return self.batch * self.config.n_heads * self.q_len * self.k_len
