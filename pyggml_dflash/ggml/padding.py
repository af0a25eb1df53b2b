"""Of how many rows a product is made, so that its kernel rounds alike whatever their number. Layer 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pyggml_dflash.ggml.tensor import WeightKind

MOST_PADDED: Final = 128  # rows; products of more, those of long prompts, are left as they are


@dataclass(frozen=True, slots=True)
class Padding:
    """Copies of rows are added until there are at least so many, and a multiple of so many."""

    least: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        assert MOST_PADDED % self.multiple == 0

    def rows(self, n: int) -> int:
        """Of what `n` rows are made."""
        return n if n > MOST_PADDED else -(-max(n, self.least) // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class Paddings:
    """The padding of products with every kind of weight."""

    kinds: Mapping[WeightKind, Padding] = field(default_factory=dict)
    others: Padding = Padding()

    def __bool__(self) -> bool:
        return bool(self.kinds) or self.others != Padding()

    def rows(self, kind: WeightKind | None, n: int) -> int:
        """Of what a product of `n` rows with such a weight is made; None: it is no weight."""
        return n if kind is None else self.kinds.get(kind, self.others).rows(n)


NO_PADDING: Final = Paddings()
