"""A grammar of answers that call tools, in the form in which a model's template writes calls. Layer 2.

It is Lark as llguidance reads it. JSON arguments follow the tool's schema; where that names parameters and
does not say whether there may be others, there are none. In XML the parameters come in the order of the
schema; values that may be strings are any text that cannot be taken for a tag, others are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyggml_dflash.errors import UsageError, quoted
from pyggml_dflash.model.answer import AnswerForm
from pyggml_dflash.model.call_parser import (
    CALL_CLOSE,
    CALL_OPEN,
    FUNCTION_CLOSE,
    FUNCTION_OPEN,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
    XML_NAME,
)
from pyggml_dflash.model.tools import Tool, json_text

VALUE_END: Final = f"\n{PARAMETER_CLOSE}\n"
_TAGS: Final = (PARAMETER_OPEN, PARAMETER_CLOSE, FUNCTION_CLOSE, CALL_CLOSE)
# Text in which none of them is, as a terminal of Lark.
_TEXT: Final = "/(?s:.*)/ & ~/(?s:.*)({})(?s:.*)/".format("|".join(tag.replace("/", r"\/") for tag in _TAGS))
_DEFINITIONS: Final = ("$defs", "definitions")


def tool_grammar(
    form: AnswerForm, tools: Sequence[Tool], *, name: str | None = None, parallel: bool = True, space: str
) -> str:
    """Calls of `tools`, one at least, or one call of the tool that is called `name`.

    `parallel`: more calls may follow. `space`: what may stand between the parts of JSON, as an expression.
    """
    if not tools:
        raise UsageError("no tool is given that could be called")
    chosen = [tool for tool in tools if name is None or tool.name == name]
    if not chosen:
        raise UsageError(f"there is no tool {name!r}; there are {', '.join(tool.name for tool in tools)}")
    rules = _Rules(space)
    write = rules.xml if form.xml_calls else rules.json
    calls = [write(tool, form) for tool in chosen]
    more = '("\\n" call)*' if parallel and name is None and not form.bare_calls else ""
    return "\n".join([f"start: call {more}", f"call: {' | '.join(calls)}", *rules.lines, ""])


class _Rules:
    """The rules below that of a call."""

    def __init__(self, space: str) -> None:
        self.lines: list[str] = []
        self._space = space

    def json(self, tool: Tool, form: AnswerForm) -> str:
        head = f'{{"name": {json_text(tool.name)}, "{form.arguments_key}": '
        opens, closes = ("", "") if form.bare_calls else (f"{CALL_OPEN}\n", f"\n{CALL_CLOSE}")
        arguments = self._json({"type": "object", **tool.schema, **_named_only(tool)})
        return f"{_literal(opens + head)} {arguments} {_literal('}' + closes)}"

    def xml(self, tool: Tool, form: AnswerForm) -> str:
        _check_name("name", tool.name, tool)
        needed = _needed(tool)
        parts = [_literal(f"{CALL_OPEN}\n{FUNCTION_OPEN}{tool.name}>\n")]
        for key in dict.fromkeys([*tool.parameters, *needed]):
            _check_name("parameter", key, tool)
            value = f"{_literal(f'{PARAMETER_OPEN}{key}>' + chr(10))} {self._value(tool, key)}"
            parts.append(value if key in needed else f"({value})?")
        return " ".join([*parts, _literal(f"{FUNCTION_CLOSE}\n{CALL_CLOSE}")])

    def _value(self, tool: Tool, key: str) -> str:
        """A value and the tag behind it."""
        schema = tool.parameters.get(key, {})
        if "string" not in tool.types(key):
            whole = {**{name: tool.schema[name] for name in _DEFINITIONS if name in tool.schema}, **schema}
            return f"{self._json(whole)} {_literal(VALUE_END)}"
        choices = _choices(schema)
        if choices is not None:
            return f"({' | '.join(_literal(choice) for choice in choices)}) {_literal(VALUE_END)}"
        rule = f"VALUE: ({_TEXT}) {_literal(VALUE_END)}"
        if rule not in self.lines:
            self.lines.append(rule)
        return "VALUE"

    def _json(self, schema: Mapping[str, Any]) -> str:
        name = f"json_{len(self.lines)}"
        text = json.dumps({"x-guidance": {"whitespace_pattern": self._space}, **schema}, ensure_ascii=False)
        self.lines.append(f"{name}: %json {text}")
        return name


def _needed(tool: Tool) -> list[str]:
    """Parameters that every call has, also such as the schema says nothing else of."""
    required = tool.schema.get("required") or []
    if isinstance(required, list) and all(isinstance(name, str) for name in required):
        return required
    raise UsageError(f"required of tool {tool.name!r} is {quoted(required)}; it must be a list of names")


def _named_only(tool: Tool) -> dict[str, Any]:
    """Keys of a schema that keep its arguments to those that it names, be it only as required."""
    properties = tool.schema.get("properties")
    if not isinstance(properties, Mapping) or "additionalProperties" in tool.schema:
        return {}
    unsaid: dict[str, Any] = {name: {} for name in _needed(tool) if name not in properties}
    return {"properties": {**properties, **unsaid}, "additionalProperties": False}


def _choices(schema: object) -> list[str] | None:
    """The only texts that a parameter may have; None if it has others, too."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        return None
    return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None


def _check_name(what: str, name: object, tool: Tool) -> None:
    if not isinstance(name, str) or not name or not XML_NAME.fullmatch(name):
        raise UsageError(
            f"the {what} {name!r} of tool {tool.name!r} cannot be written in a call, which is XML"
        )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
