"""What happens for a while, and whether something else happened at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Spell:
    """Begins and ends, again and again, on one thread; read on others."""

    n_begun: int = 0
    n_ended: int = 0

    def mark(self) -> int:
        """To be asked about later."""
        return self.n_ended

    def since(self, mark: int) -> bool:
        """True if one was on at the mark or began behind it."""
        return self.n_begun > mark

    @contextmanager
    def on(self) -> Iterator[None]:
        """One of them."""
        self.n_begun += 1
        try:
            yield
        finally:
            self.n_ended += 1
