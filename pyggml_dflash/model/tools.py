"""Functions that a model may call, as callers describe them, and the values of their parameters. Layer 2.

A tool is `{"type": "function", "function": {"name": ..., "parameters": SCHEMA}}`, or the inner object alone;
the schema may also be called `input_schema`. Templates that write a call as XML give every value as bare
text, so its type is in the schema: `Tool.argument` reads it there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyggml_dflash.errors import UsageError, quoted

Types = frozenset[str]

ANY_TYPE: Final[Types] = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_REFERENCES: Final = 32  # nested in a schema; a reference may lead to itself
# Templates write them as Python does.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function: its name, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schemas of the parameters that are named, by name."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def types(self, name: str) -> Types:
        """The JSON types that a parameter may have."""
        return _types(self.parameters.get(name), self.schema)

    def argument(self, name: str, text: str) -> str | None:
        """The JSON of a value written as bare `text`; None if its type does not allow that text.

        Text that could be a string or something else is something else: 5 is the number.
        """
        types = self.types(name)
        bare = text.strip()
        word = _PYTHON_WORDS.get(bare, bare)
        value = None if types == {"string"} else read_json(word)
        if value is not None and (types - {"string"}) & _types_of(value[0]):
            return word
        return json_text(text) if "string" in types else None


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Tools as a caller gives them; UsageError names the one that cannot be used by its index."""
    if tools is None:
        return ()
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise UsageError(f"tools is {quoted(tools)}; it must be a list of objects")
    read = tuple(_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    first: dict[str, int] = {}
    for i, tool in enumerate(read):
        if first.setdefault(tool.name, i) != i:
            raise UsageError(f"tools[{i}] is named {tool.name!r}, as tools[{first[tool.name]}] is")
    return read


def _read_tool(where: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise UsageError(f"{where} is {quoted(tool)}; it must be an object")
    if "function" in tool:
        where, tool = f"{where}.function", tool["function"]
        if not isinstance(tool, Mapping):
            raise UsageError(f"{where} is {quoted(tool)}; it must be an object")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}.name is {quoted(name)}; it must be the name of a function")
    key = "input_schema" if "input_schema" in tool else "parameters"
    schema = tool.get(key)
    if schema is not None and not isinstance(schema, Mapping):
        raise UsageError(f"{where}.{key} is {quoted(schema)}; it must be a JSON schema")
    return Tool(name=name, schema={} if schema is None else schema)


def read_json(text: str) -> tuple[Any] | None:
    """The value of JSON text, in a tuple since it may be None; None if it is none, or cannot be passed on."""
    try:
        text.encode()  # a lone surrogate is no character
        return (json.loads(text, parse_constant=_refuse_constant, parse_float=_finite),)
    except (ValueError, RecursionError):
        return None


def json_text(value: str) -> str:
    """A string as JSON, readable where it can be."""
    return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is larger than a number can be here")
    return value


def _types(schema: object, root: Mapping[str, Any], depth: int = 0) -> Types:
    """The JSON types that a schema allows; all of them where it does not say, or says it in other words."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return ANY_TYPE
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(reference, root), root, depth + 1)
    allowed = _declared(schema.get("type"))
    if isinstance(values := schema.get("enum"), Sequence):
        allowed &= _union(_types_of(value) for value in values)
    if "const" in schema:
        allowed &= _types_of(schema["const"])
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), Sequence) and parts:
            allowed &= _union(_types(part, root, depth + 1) for part in parts)
    if isinstance(parts := schema.get("allOf"), Sequence):
        for part in parts:
            allowed &= _types(part, root, depth + 1)
    if schema.get("nullable") is True:
        allowed |= {"null"}
    return allowed or ANY_TYPE


def _declared(type: object) -> Types:
    names = [type] if isinstance(type, str) else type
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        return ANY_TYPE
    return (frozenset(names) & ANY_TYPE) or ANY_TYPE


def _union(types: Any) -> Types:
    return frozenset().union(*types)


def _types_of(value: object) -> Types:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        is_whole = isinstance(value, int) or value.is_integer()
        return frozenset({"number", "integer"} if is_whole else {"number"})
    return frozenset(
        {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
    )


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """What '#/$defs/name' refers to; None where it leads nowhere."""
    found: object = root
    head, *path = reference.split("/")
    if head != "#":
        return None
    for part in path:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
