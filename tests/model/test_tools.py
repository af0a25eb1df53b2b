"""Tools as callers describe them, and bare text read as what a parameter's schema says it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml_dflash.errors import UsageError
from pyggml_dflash.model.tools import Tool, read_tools

NAMED = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "null"}}}


def read(schema: Any, text: str) -> Any:
    """The value of `text` under `schema`; Ellipsis if it is refused."""
    tool = Tool(name="f", schema={"properties": {"x": schema}, **NAMED})
    value = tool.argument("x", text)
    return ... if value is None else json.loads(value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " a\n\tb ", " a\n\tb "),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, 'say "\\n" \u00e9 \U0001f642', 'say "\\n" \u00e9 \U0001f642'),
        ({"type": "integer"}, "\n 5 ", 5),
        ({"type": "integer"}, "-7.0", -7),
        ({"type": "integer"}, "5.5", ...),
        ({"type": "integer"}, "five", ...),
        ({"type": "integer"}, "", ...),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "2.5e3", 2500.0),
        ({"type": "number"}, "NaN", ...),
        ({"type": "number"}, "05", ...),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", ...),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[1, 2", ...),
        ({"type": "array"}, '{"a": 1}', ...),
        ({"type": "object"}, '{"a": {"b": []}}', {"a": {"b": []}}),
        ({"type": "object"}, "{'a': 1}", ...),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "12 apples", "12 apples"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "yes", ...),
        ({"oneOf": [{"type": "array"}, {}]}, "any", "any"),
        ({"allOf": [{"type": ["string", "number"]}, {"type": "string"}]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "True", True),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"$ref": "#/$defs/n"}, "x", ...),
        ({"$ref": "#/$defs/a~1b"}, "null", None),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/nowhere"}, "text", "text"),
        ({"$ref": "http://example.org/n"}, "text", "text"),
        ({"type": "rope"}, "text", "text"),
        ({"type": 5}, "5", 5),
        ({}, "[1]", [1]),
        ({}, "plain", "plain"),
        ({}, '"quoted"', '"quoted"'),
        (True, "5", 5),
        (None, "5", 5),
    ],
)
def test_a_value_is_read_as_its_type(schema: Any, text: str, value: Any) -> None:
    found = read(schema, text)
    assert found == value
    assert type(found) is type(value) or isinstance(value, int)


def test_a_number_keeps_the_digits_it_was_written_with() -> None:
    tool = Tool(name="f", schema={"properties": {"x": {"type": "number"}}})
    for text in ("1.10", "123456789012345678901234567890", "0.1000000000000000055"):
        assert tool.argument("x", f"\n{text}\n") == text


def test_a_parameter_that_no_schema_names_is_what_its_text_says() -> None:
    assert Tool(name="f").argument("x", "[1]") == "[1]"
    assert Tool(name="f", schema={"properties": 5}).argument("x", "a") == '"a"'


@given(
    st.text(),
    st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "object", "null", "number"])}),
        st.fixed_dictionaries({"enum": st.lists(st.one_of(st.none(), st.integers(), st.text()))}),
        st.just({}),
    ),
)
def test_what_is_read_is_json_whatever_the_text(text: str, schema: dict[str, Any]) -> None:
    value = Tool(name="f", schema={"properties": {"x": schema}}).argument("x", text)
    if value is not None:
        json.loads(value)
    elif schema:
        assert schema.get("type") != "string"


def test_tools_are_read_in_each_form() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    wanted = Tool(name="f", schema=schema)
    assert read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}]) == (wanted,)
    assert read_tools([{"name": "f", "parameters": schema}]) == (wanted,)
    assert read_tools([{"name": "f", "input_schema": schema}]) == (wanted,)
    assert read_tools([{"name": "f"}, {"name": "g", "parameters": None}]) == (
        Tool(name="f"),
        Tool(name="g"),
    )
    assert read_tools(None) == read_tools([]) == ()


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("f", "tools is 'f'"),
        ({"name": "f"}, "tools is "),
        ([5], r"tools\[0\] is 5"),
        ([{"function": None}], r"tools\[0\]\.function is None"),
        ([{"name": "f"}, {"name": ""}], r"tools\[1\]\.name is ''"),
        ([{"name": 10**5000}], r"tools\[0\]\.name is a number of int with thousands of digits"),
        ([{"name": deep()}], r"tools\[0\]\.name is nested too deeply"),
        ([{"name": "f", "parameters": []}], r"tools\[0\]\.parameters is \[\]"),
        ([{"name": "f"}, {"name": "f"}], r"tools\[1\] is named 'f', as tools\[0\] is"),
    ],
)
def test_a_tool_that_cannot_be_used_is_named(tools: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_tools(tools)
