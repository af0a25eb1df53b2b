"""Bodies drawn from the schemas that document them, right ones and wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from hypothesis import strategies as st

# No whole number as a float: JSON's schemas take 1.0 for an integer, and nothing here does.
_FLOATS: Final = st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: x != int(x))
_TEXTS: Final = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=6)
JUNK: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | _FLOATS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


def right(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema describes."""
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return st.one_of([right(branch) for branch in branches])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "integer":
        return st.integers(schema["minimum"], min(schema["maximum"], schema["minimum"] + 40))
    if kind == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        return st.floats(low, schema["maximum"], exclude_min="exclusiveMinimum" in schema)
    if kind == "string":
        pattern = schema.get("pattern")
        return (
            st.from_regex(pattern, fullmatch=True)
            if pattern
            else _TEXTS.filter(lambda t: t or not schema.get("minLength"))
        )
    if kind == "array":
        least = schema.get("minItems", 0)
        return st.lists(right(schema["items"]), min_size=least, max_size=min(schema.get("maxItems", 3), 3))
    if kind == "object":
        return _object(schema)
    return {"boolean": st.booleans(), "null": st.none()}.get(kind or "", JUNK)


def _object(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" in schema:
        found = {name: right(member) for name, member in schema["properties"].items()}
        needed = schema.get("required", ())
        return st.fixed_dictionaries(
            {name: found[name] for name in needed},
            optional={name: member for name, member in found.items() if name not in needed},
        )
    if "propertyNames" in schema:
        names = st.from_regex(schema["propertyNames"]["pattern"], fullmatch=True)
        return st.dictionaries(names, right(schema["additionalProperties"]), max_size=2)
    return st.dictionaries(_TEXTS, JUNK, max_size=2)


@st.composite
def few(draw: st.DrawFn, schema: Mapping[str, Any], *, most: int = 4) -> Any:
    """A right body with few of the members that it may leave out."""
    needed = list(schema["required"])
    names = draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=most, unique=True))
    return {name: draw(right(schema["properties"][name])) for name in dict.fromkeys(needed + names)}


@st.composite
def damaged(draw: st.DrawFn, bodies: st.SearchStrategy[Any]) -> Any:
    """A body with one value of it replaced, left out or added."""
    body = copy.deepcopy(draw(bodies))
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        inner = [key for key in keys if isinstance(place[key], (dict, list))]
        if inner and draw(st.booleans()):
            place = place[draw(st.sampled_from(inner))]
            continue
        if keys and draw(st.booleans()):
            key = draw(st.sampled_from(keys))
            if draw(st.booleans()):
                place[key] = draw(JUNK)
            else:
                del place[key]
        elif isinstance(place, dict):
            place[draw(_TEXTS)] = draw(JUNK)
        else:
            place.append(draw(JUNK))
        return body
