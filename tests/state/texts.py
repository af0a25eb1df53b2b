"""Stored prefixes without a state: tokens, a size, and whether they were closed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def ids(text: str) -> NDArray[np.int32]:
    """One token per character."""
    return np.array([ord(c) for c in text], np.int32)


@dataclass(eq=False)
class Text:
    """A stored text of some size; closing it twice is a mistake."""

    text: str
    n_bytes: int = 10
    protected: bool = False
    pinned: bool = False
    own: bool = False
    closed: bool = False
    tokens: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = ids(self.text)

    def close(self) -> None:
        """Free it."""
        assert not self.closed, f"{self.text!r} was closed before"
        self.closed = True

    def __repr__(self) -> str:
        return f"Text({self.text!r}, {self.n_bytes})"
