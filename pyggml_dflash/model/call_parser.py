"""One tool call as models write it: XML or JSON, inside of <tool_call> or alone. Layer 2.

    <function=NAME>                      {"name": NAME, "arguments": {"KEY": value}}
    <parameter=KEY>
    value
    </parameter>
    </function>

Only a call of a known tool that keeps its form to the end is one. In XML nothing is escaped: a value ends
where the next parameter or the end of the whole call follows it, and not at `</parameter>` in its midst. A
parameter or the end of the call that comes before the value was closed breaks the form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyggml_dflash.model.answer import CALL_TAGS
from pyggml_dflash.model.growing_text import GrowingText, Steps
from pyggml_dflash.model.tools import Tool, json_text, read_json

CALL_OPEN, CALL_CLOSE = CALL_TAGS
FUNCTION_OPEN: Final = "<function="
FUNCTION_CLOSE: Final = "</function>"
PARAMETER_OPEN: Final = "<parameter="
PARAMETER_CLOSE: Final = "</parameter>"

XML_NAME: Final = re.compile(r"[^<>\n]{0,256}")
_IN_VALUE: Final = re.compile(f"{PARAMETER_CLOSE}|{FUNCTION_CLOSE}|{PARAMETER_OPEN}")
_OUTSIDE_STRINGS: Final = re.compile(r"[^\s\w.,:+-]")  # brackets, quotes, and what JSON has no use for
_INSIDE_STRINGS: Final = re.compile(r'["\\\x00-\x1f]')
_SPACE: Final = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call in a text: `arguments` is the text of a JSON object, `end` is where the call ends."""

    name: str
    arguments: str
    end: int


class CallParser:
    """Reads calls of these tools from a text."""

    def __init__(self, source: GrowingText, tools: Mapping[str, Tool]) -> None:
        self._source, self._tools = source, tools

    def envelope(self, at: int) -> Steps[FoundCall | None]:
        """The call whose <tool_call> begins at `at`; None if it is none."""
        source = self._source
        at = yield from source.space(at + len(CALL_OPEN))
        kind = yield from source.looking_at(at, FUNCTION_OPEN, "{")
        if kind is None:
            return None
        call = yield from (self._xml(at + len(kind)) if kind == FUNCTION_OPEN else self.json(at))
        end = None if call is None else (yield from source.then(call.end, CALL_CLOSE))
        return None if call is None or end is None else FoundCall(call.name, call.arguments, end)

    def json(self, at: int) -> Steps[FoundCall | None]:
        """The call that is the JSON object at `at`."""
        end = yield from self._object_end(at)
        if end is None:
            return None
        members = _members(self._source.text[at:end])
        name = read_json(members.get("name", ""))
        arguments = members.get("arguments", members.get("parameters", "{}"))
        value = read_json(arguments)
        if value is not None and isinstance(value[0], str):  # JSON inside of JSON
            arguments = value[0].strip()
            value = read_json(arguments)
        if name is None or value is None or not isinstance(value[0], dict):
            return None
        is_known = isinstance(name[0], str) and name[0] in self._tools
        return FoundCall(name[0], arguments, end) if is_known else None

    def _object_end(self, at: int) -> Steps[int | None]:
        """Where the object that begins at `at` ends; None if it cannot be JSON, or has no end."""
        source, depth, is_inside = self._source, 0, False
        while True:
            match = (_INSIDE_STRINGS if is_inside else _OUTSIDE_STRINGS).search(source.text, at)
            if match is None:
                if source.ended:
                    return None
                at = max(at, len(source.text))
                yield
                continue
            at, char = match.end(), match[0]
            if char == '"':
                is_inside = not is_inside
            elif char == "\\" and is_inside:
                at += 1  # what it escapes
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if depth == 0:
                    return at
            else:
                return None

    def _xml(self, at: int) -> Steps[FoundCall | None]:
        """The call whose function name begins at `at`, up to `</function>`."""
        source = self._source
        name = yield from self._name(at)
        tool = None if name is None else self._tools.get(name)
        if name is None or tool is None:
            return None
        members: dict[str, str] = {}
        at = yield from source.space(at + len(name) + 1)
        while (yield from source.looking_at(at, PARAMETER_OPEN)) is not None:
            start = at + len(PARAMETER_OPEN)
            key = yield from self._name(start)
            if key is None or key in members:
                return None
            start += len(key) + 1
            stop = yield from self._value_end(start, tool)
            value = None if stop is None else tool.argument(key, _without_breaks(source.text[start:stop]))
            if stop is None or value is None:
                return None
            members[key] = value
            at = yield from source.space(stop + len(PARAMETER_CLOSE))
        end = yield from source.then(at, FUNCTION_CLOSE)
        arguments = ", ".join(f"{json_text(key)}: {value}" for key, value in members.items())
        return None if end is None else FoundCall(name, f"{{{arguments}}}", end)

    def _value_end(self, at: int, tool: Tool) -> Steps[int | None]:
        """Where the value that begins at `at` ends; None where something breaks in."""
        source = self._source
        while True:
            match = _IN_VALUE.search(source.text, at)
            if match is None:
                if source.ended:
                    return None
                at = max(at, len(source.text) - len(PARAMETER_CLOSE) + 1)
                yield
                continue
            at = match.end()
            if match[0] == PARAMETER_CLOSE:
                if (yield from self._ends_value(at)):
                    return match.start()
            elif match[0] == FUNCTION_CLOSE:
                if (yield from source.then(at, CALL_CLOSE)) is not None:
                    return None
            elif _may_be_parameter((yield from self._name(at)), tool):
                return None

    def _ends_value(self, at: int) -> Steps[bool]:
        """Whether what follows the last parameter or another one begins at `at`."""
        at = yield from self._source.space(at)
        mark = yield from self._source.looking_at(at, PARAMETER_OPEN, FUNCTION_CLOSE)
        if mark != FUNCTION_CLOSE:
            return mark is not None
        return (yield from self._source.then(at + len(mark), CALL_CLOSE)) is not None

    def _name(self, at: int) -> Steps[str | None]:
        """What stands between `at` and the next '>'; None if that is no name."""
        source = self._source
        end = yield from source.match_end(XML_NAME, at)
        return source.text[at:end] if end > at and source.text.startswith(">", end) else None


def _may_be_parameter(name: str | None, tool: Tool) -> bool:
    return name is not None and (name in tool.parameters or not tool.parameters)


def _without_breaks(value: str) -> str:
    """A parameter's value without the line breaks that templates put around it."""
    for line_break in ("\r\n", "\n"):
        if value.startswith(line_break):
            value = value[len(line_break) :]
            break
    for line_break in ("\r\n", "\n"):
        if value.endswith(line_break):
            return value[: -len(line_break)]
    return value


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written; none if `text` is not one."""
    if read_json(text) is None:
        return {}
    members: dict[str, str] = {}
    scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().raw_decode
    at = _after_space(text, 1)
    while text[at] != "}":
        key, at = scan(text, at)
        start = _after_space(text, _after_space(text, at) + 1)
        _, at = scan(text, start)
        members[key] = text[start:at]
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return members


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
