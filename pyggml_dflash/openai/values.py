"""Values that members of a body may have: each checks what is given, and is the schema of it. Layer 7.

A refusal is a `UsageError` with the path of the member. Null is the same as absent for a member that may be
absent. JSON's types are kept apart: true is no number, and 1.0 no whole one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import MAX_COUNT, check_choice, check_flag, check_int, check_number, refusal

_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "array": list,
    "object": Mapping,
    "integer": int,
}


@dataclass(frozen=True, slots=True)
class Value:
    """What a member may be. `check` gets its path and what is given, and raises `UsageError`."""

    schema: Mapping[str, Any]
    check: Callable[[str, Any], None]
    name: str = "a value"  # as refusals call it

    def about(self, description: str) -> Value:
        """The same value, documented."""
        return replace(self, schema={**self.schema, "description": description})


def whole(low: int, high: int = MAX_COUNT) -> Value:
    """A whole number."""
    return _leaf(
        {"type": "integer", "minimum": low, "maximum": high},
        lambda where, value: check_int(where, value, low, high),
        "a whole number",
    )


def number(low: float, high: float, above: bool = False) -> Value:
    """A number from `low`, or above it, to `high`."""
    least = {"exclusiveMinimum" if above else "minimum": low}
    return _leaf(
        {"type": "number", **least, "maximum": high},
        lambda where, value: check_number(where, value, low, high, above=above),
        "a number",
    )


def text(*, least: int = 0, pattern: str = "", wanted: str = "") -> Value:
    """Text of so many characters, or all of which a pattern describes, in words `wanted`."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, str):
            raise refusal(where, value, "it must be text")
        if len(value) < least:
            raise refusal(where, value, "it must not be empty")
        if not _is_unicode(value):
            raise refusal(where, value, "it has a lone surrogate, which is no character")
        if pattern and not re.fullmatch(pattern, value):
            raise refusal(where, value, f"it must be {wanted}")

    schema: dict[str, Any] = {"type": "string"}
    if least:
        schema["minLength"] = least
    if pattern:
        schema["pattern"] = f"^{pattern}$"
    return _leaf(schema, check, "text")


def choice(*names: str) -> Value:
    """One of these texts."""
    return _leaf(
        {"type": "string", "enum": list(names)},
        lambda where, value: check_choice(where, value, names),
        "text",
    )


def only(constant: Any, why: str) -> Value:
    """A value that has one form here, and `why`."""

    def check(where: str, value: Any) -> None:
        if type(value) is not type(constant) or value != constant:
            raise refusal(where, value, f"it must be {constant}: {why}")

    return _leaf({"const": constant}, check, f"{constant}")


def items(of: Value, *, least: int = 0, most: int | None = None) -> Value:
    """A list."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, list):
            raise _refused(where, value, "it must be a list")
        if len(value) < least:
            raise _refused(where, value, f"it must be a list of at least {least} item")
        if most is not None and len(value) > most:
            raise UsageError(f"{where} has {len(value)} items; it may have {most}", param=where)
        for i, item in enumerate(value):
            of.check(f"{where}[{i}]", item)

    schema: dict[str, Any] = {"type": "array", "items": of.schema}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return Value(schema, check, "a list")


def record(members: Mapping[str, Value], *, required: Collection[str] = ()) -> Value:
    """An object with members of these names; others are refused."""

    def check(where: str, value: Any) -> None:
        _object(where, value)
        for name in value:
            if name not in members:
                shown = name[:60] if name.isidentifier() else ascii(name[:60])
                at = _at(where, shown)
                raise UsageError(f"{at} is not known here; it would be ignored, so it is refused", param=at)
        for name, member in value.items():
            if member is not None or name in required:
                members[name].check(_at(where, name), member)
        for name in required:
            if name not in value:
                raise UsageError(f"{_at(where, name)} is missing", param=_at(where, name))

    properties = {
        name: dict(value.schema) if name in required else _or_null(value) for name, value in members.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    return Value(schema, check, "an object")


def typed(kind: str, members: Mapping[str, Value], optional: Mapping[str, Value] | None = None) -> Value:
    """An object whose `type` is `kind`; it has `members`, and may have the optional ones."""
    return record({"type": choice(kind), **(optional or {}), **members}, required=("type", *members))


def mapping(key: str, wanted: str, of: Value) -> Value:
    """An object with members of any name that a pattern describes, in words `wanted`."""

    surrogate = "it has a lone surrogate, which is no character"

    def check(where: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise _refused(where, value, f"it must be an object whose names are {wanted}")
        for name, member in value.items():
            if not _is_unicode(name):
                raise _refused(f"{where} key", name, surrogate, param=where)
            if not re.fullmatch(key, name):
                raise _refused(f"{where} key", name, f"it must be {wanted}", param=where)
            of.check(f"{where}.{name}", member)

    schema = {
        "type": "object",
        "propertyNames": {"pattern": f"^{key}$"},
        "additionalProperties": of.schema,
    }
    return Value(schema, check, "an object")


def by_type(*, default: str | None = None, **kinds: Value) -> Value:
    """An object that its member `type` tells apart, which is `default` where it is absent.

    `kinds` describe the whole object.
    """
    wanted = f"its type must be {' or '.join(map(repr, kinds))}"

    def check(where: str, value: Any) -> None:
        kind = value.get("type") if isinstance(value, Mapping) else ""
        kind = default if kind is None else kind
        if not isinstance(kind, str) or kind not in kinds:
            raise _refused(where, value, wanted)
        kinds[kind].check(where, value)

    return Value({"oneOf": [kind.schema for kind in kinds.values()]}, check, "an object")


def either(*values: Value) -> Value:
    """Any of several values, each of another type of JSON."""
    wanted = f"it must be {' or '.join(dict.fromkeys(value.name for value in values))}"

    def check(where: str, value: Any) -> None:
        for candidate in values:
            if _is(candidate, value):
                candidate.check(where, value)
                return
        raise _refused(where, value, wanted)

    return Value({"anyOf": [value.schema for value in values]}, check, wanted.removeprefix("it must be "))


def _is(value: Value, given: Any) -> bool:
    """True if the type of what is given is that of a value."""
    return isinstance(given, _TYPES[value.schema.get("type", "object")]) and not isinstance(given, bool)


def _leaf(schema: Mapping[str, Any], check: Callable[[str, Any], None], name: str) -> Value:
    """A value whose check knows its path by the name that it quotes."""

    def named(where: str, value: Any) -> None:
        try:
            check(where, value)
        except UsageError as error:
            raise UsageError(str(error), param=where) from None

    return Value(schema, named, name)


def _refused(where: str, value: Any, wanted: str, *, param: str | None = None) -> UsageError:
    return UsageError(str(refusal(where or "the body", value, wanted)), param=(param or where) or None)


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _or_null(value: Value) -> dict[str, Any]:
    """The schema of a member that may be null."""
    schema = dict(value.schema)
    if not schema.keys() - {"description"} or schema.get("type") == "null":
        return schema
    about = {"description": schema.pop("description")} if "description" in schema else {}
    return {"anyOf": [schema, {"type": "null"}], **about}


def _object(where: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise _refused(where, value, "it must be an object")


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unsupported(where: str, value: Any) -> None:
    if value is not None:
        raise refusal(where, value, "this is not supported here")


FLAG: Final = _leaf({"type": "boolean"}, check_flag, "true or false")
TEXT: Final = text()
OBJECT: Final = Value({"type": "object"}, _object, "an object")
IGNORED: Final = Value({"description": "Accepted; it changes nothing here."}, lambda where, value: None)
UNSUPPORTED: Final = _leaf(
    {"type": "null", "description": "Not supported: refused unless null or absent."}, _unsupported, "null"
)


def check_items(where: str, values: Sequence[object], most: int) -> None:
    """Refuse a list that is longer than a transport takes."""
    if len(values) > most:
        raise UsageError(f"{where} has {len(values)} items; at most {most} are taken", param=where)
