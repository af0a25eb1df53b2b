"""Text that grows while it is parsed, and looks ahead in it that wait for more. Layer 2.

A look is a generator: it yields where what is there does not decide yet, and returns once it does, or once
the text has ended. So a parser that is made of such looks reads like one that has all of the text, and what
it finds does not depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # yields where more text is needed

_SPACE: Final = re.compile(r"\s*")


class GrowingText:
    """The part of a text that its parser still needs. Positions count from its beginning."""

    def __init__(self) -> None:
        self.text = ""
        self.n_taken = 0  # characters of the whole text that are gone
        self.ended = False  # nothing more will come

    def take(self, n: int) -> str:
        """Remove the first `n` characters, and return them."""
        taken, self.text = self.text[:n], self.text[n:]
        self.n_taken += len(taken)
        return taken

    def looking_at(self, at: int, *literals: str) -> Steps[str | None]:
        """Which of the literals stands at `at`. None of them begins another."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, at):
                    return literal
            rest = self.text[at : at + max(map(len, literals))]
            if self.ended or not any(literal.startswith(rest) for literal in literals):
                return None
            yield

    def match_end(self, pattern: re.Pattern[str], at: int) -> Steps[int]:
        """Where a match of `pattern` at `at` ends, which must be able to match nothing."""
        while True:
            match = pattern.match(self.text, at)
            assert match is not None
            if match.end() < len(self.text) or self.ended:
                return match.end()
            yield

    def space(self, at: int) -> Steps[int]:
        """Where the next character stands that is no space; the end of the text if none comes."""
        return (yield from self.match_end(_SPACE, at))

    def then(self, at: int, literal: str) -> Steps[int | None]:
        """Where `literal` ends if it comes next, space aside; else None."""
        at = yield from self.space(at)
        found = yield from self.looking_at(at, literal)
        return None if found is None else at + len(literal)

    def certain_before(self, *marks: str) -> int:
        """Up to where the text cannot be the beginning of one of the marks, which are not in it."""
        return min((_open_start(self.text, mark) for mark in marks), default=len(self.text))


def _open_start(text: str, mark: str) -> int:
    """Where the longest end of `text` starts that may grow into `mark`; the length of `text` if none."""
    for n in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:n]):
            return len(text) - n
    return len(text)
