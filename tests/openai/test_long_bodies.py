"""What a body has many of is looked at once, not once for each of the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pyggml_dflash.model.tools import read_tools
from pyggml_dflash.openai.texts import members_of
from pyggml_dflash.serve.messages_turns import turns_of

N = 2000


class Name(str):
    """Counts how often names are compared."""

    n_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.n_compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


class Piece(str):
    """Counts the characters that are copied to put it behind others."""

    n_copied = 0

    def __radd__(self, before: str) -> str:
        Piece.n_copied += len(before)
        return before.__add__(str(self))


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda names: members_of([(name, 1) for name in names]), "'z' stands twice in one object"),
        (lambda names: read_tools([{"name": name} for name in names]), f"tools[{N + 1}] is named 'z', as"),
    ],
    ids=["members", "tools"],
)
def test_a_name_that_stands_twice_is_found_without_comparing_all(
    read: Callable[[list[Name]], Any], says: str
) -> None:
    Name.n_compared = 0
    with pytest.raises(ValueError, match=re.escape(says)):
        read([*(Name(f"a{i}") for i in range(N)), Name("z"), Name("z")])
    assert Name.n_compared < 2 * N


def test_reasoning_in_many_pieces_is_put_together_once() -> None:
    Piece.n_copied = 0
    thoughts = [{"type": "thinking", "thinking": Piece("so ")}] * N
    asked = {"role": "user", "content": "Go on."}
    turns = turns_of({"messages": [{"role": "assistant", "content": thoughts}, asked]})
    assert turns[0]["reasoning_content"] == "so " * N
    assert Piece.n_copied <= 3 * N
