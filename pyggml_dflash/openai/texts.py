"""JSON texts of requests, read as strictly for a server as for a file of lines. Layer 7."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

MAX_DIGITS: Final = 4300  # which Python turns into a number; the time grows with the square


class TooDeepError(ValueError):
    """A text is nested more deeply than it is read."""


def read_json(text: str) -> Any:
    """The value of a JSON text, all of which can be written as JSON again.

    Raises ValueError with what is wrong. NaN and infinity are no numbers of JSON, and of two members of one
    name one would be lost.
    """
    try:
        return json.loads(
            text,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=members_of,
        )
    except RecursionError as error:
        raise TooDeepError("it is nested too deeply") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:60]} is larger than a number can be here")
    return value


def members_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object's members; ValueError for a name that stands there twice. Looks at each name once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:60]!r} stands twice in one object")
    return found
