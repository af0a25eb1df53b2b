"""Grammars of tool calls: what they describe is what the parser of answers takes for calls, in every form."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from pyggml_dflash import Constraint, UsageError
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.constraint import JSON_SPACE, Constraints
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.answer import AnswerForm
from pyggml_dflash.model.answer_parser import AnswerParser
from pyggml_dflash.model.chat import ChatTemplate
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.model.tool_grammar import tool_grammar
from pyggml_dflash.model.tools import Tool
from tests.engine.walks import walk

WEATHER = Tool(
    name="get_weather",
    schema={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "at": {"$ref": "#/$defs/place"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city", "unit", "at"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
)
STOP = Tool(name="stop", schema={"type": "object", "properties": {}})
TOOLS = (WEATHER, STOP)
PHRASES = ("\n</parameter>\n", "</function>", "a <b>\n")
FORMS = {
    "json": AnswerForm(),
    "xml": AnswerForm(xml_calls=True),
    "bare": AnswerForm(bare_calls=True, arguments_key="parameters"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GgufFile.open(DEFAULT_MODEL) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    return Constraints(tokenizer)


def constraint_of(form: AnswerForm, tools: tuple[Tool, ...] = TOOLS, **options: Any) -> Constraint:
    return Constraint(kind="grammar", text=tool_grammar(form, tools, space=JSON_SPACE, **options))


@pytest.mark.parametrize("form", FORMS)
def test_every_answer_is_calls_with_arguments_of_their_schemas(
    constraints: Constraints, tokenizer: Tokenizer, form: str
) -> None:
    constraint, names = constraint_of(FORMS[form]), set()
    for seed in range(30):
        text = walk(constraints.matcher(constraint), tokenizer, seed, phrases=PHRASES)
        if text is None:
            continue
        answer = AnswerParser(FORMS[form], TOOLS).parse(text)
        assert (answer.content, answer.reasoning) == ("", "")
        assert answer.calls
        for call in answer.calls:
            tool = next(tool for tool in TOOLS if tool.name == call.name)
            jsonschema_rs.validate(tool.schema, json.loads(call.arguments))
            assert set(json.loads(call.arguments)) <= set(tool.parameters)
            names.add(call.name)
    assert names == {"get_weather", "stop"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"parallel": False}, {"name": "stop"}])
def test_one_call_is_the_whole_answer_if_there_may_be_no_more(
    constraints: Constraints, tokenizer: Tokenizer, form: str, options: dict[str, Any]
) -> None:
    for seed in range(12):
        matcher = constraints.matcher(constraint_of(FORMS[form], **options))
        text = walk(matcher, tokenizer, seed, phrases=PHRASES)
        if text is not None:
            calls = AnswerParser(FORMS[form], TOOLS).parse(text).calls
            assert len(calls) == 1
            assert calls[0].name in (options.get("name"), "get_weather", "stop")
            assert calls[0].name == options.get("name", calls[0].name)


def test_more_calls_follow_where_they_may(constraints: Constraints, tokenizer: Tokenizer) -> None:
    for form in ("json", "xml"):
        matcher = constraints.matcher(constraint_of(FORMS[form], (STOP,)))
        texts = [walk(matcher.copy(), tokenizer, seed) or "" for seed in range(12)]
        assert max(len(AnswerParser(FORMS[form], (STOP,)).parse(text).calls) for text in texts) > 1


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_that_is_only_required_may_have_any_value(
    constraints: Constraints, tokenizer: Tokenizer, form: str
) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x", "y"]}
    tools = (Tool(name="f", schema=schema),)
    constraint = constraint_of(FORMS[form], tools, parallel=False)
    texts = [walk(constraints.matcher(constraint), tokenizer, seed, phrases=PHRASES) for seed in range(12)]
    calls = [AnswerParser(FORMS[form], tools).parse(text).calls for text in texts if text is not None]
    assert calls
    assert {tuple(json.loads(call.arguments)) for (call,) in calls} == {("x", "y")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("required", [[["x"]], [5], "x", {"x": 1}])
def test_required_names_that_are_none_are_refused(form: str, required: object) -> None:
    tool = Tool(name="f", schema={"properties": {"x": {}}, "required": required})
    with pytest.raises(UsageError, match=r"required of tool 'f' is .*; it must be a list of names"):
        constraint_of(FORMS[form], (tool,))


def test_text_in_xml_is_free_but_for_tags(constraints: Constraints, tokenizer: Tokenizer) -> None:
    tool = Tool(name="say", schema={"properties": {"text": {"type": "string"}}, "required": ["text"]})
    matcher = constraints.matcher(constraint_of(FORMS["xml"], (tool,)))
    value = 'a < b & "c"\n</p> <param> 1'
    text = f"<tool_call>\n<function=say>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for token in tokenizer.encode(text):
        assert matcher.allows(token)
        matcher.accept(token)
    (call,) = AnswerParser(FORMS["xml"], (tool,)).parse(text).calls
    assert json.loads(call.arguments) == {"text": value}


@pytest.mark.parametrize("tag", ["</parameter>", "<parameter=text>", "</function>", "</tool_call>"])
def test_a_value_in_xml_holds_no_tag(constraints: Constraints, tokenizer: Tokenizer, tag: str) -> None:
    tool = Tool(name="say", schema={"properties": {"text": {"type": "string"}}, "required": ["text"]})
    matcher = constraints.matcher(constraint_of(FORMS["xml"], (tool,)))
    for token in tokenizer.encode("<tool_call>\n<function=say>\n<parameter=text>\nx"):
        matcher.accept(token)
    allowed = []
    for token in tokenizer.spell(tag + "y"):
        allowed.append(matcher.allows(token))
        if not allowed[-1]:
            break
        matcher.accept(token)
    assert not allowed[-1]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('<tool_call>\n{"name": x, "arguments": y}</tool_call>', AnswerForm()),
        ("<tool_call>\n<function=x>\n<parameter=y>", AnswerForm(xml_calls=True)),
        ('{"name": x, "parameters": y}', AnswerForm(bare_calls=True, arguments_key="parameters")),
        ("plain", AnswerForm(bare_calls=True)),
        ("<think></think><tool_call>", AnswerForm(reasoning=("<think>", "</think>"))),
    ],
)
def test_a_template_tells_the_form_of_calls(tokenizer: Tokenizer, source: str, expected: AnswerForm) -> None:
    assert ChatTemplate("{% raw %}" + source + "{% endraw %}", tokenizer).form == expected


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ((), {}, "no tool is given that could be called"),
        (TOOLS, {"name": "fly"}, "there is no tool 'fly'; there are get_weather, stop"),
        ((Tool(name="a<b"),), {}, "the name 'a<b' of tool 'a<b' cannot be written in a call, which is XML"),
        ((Tool(name="f", schema={"properties": {"a>b": {}}}),), {}, "the parameter 'a>b' of tool 'f' cannot"),
    ],
)
def test_what_cannot_be_called_is_refused(
    tools: tuple[Tool, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        constraint_of(FORMS["xml"], tools, **options)


def test_names_are_escaped(constraints: Constraints, tokenizer: Tokenizer) -> None:
    tool = Tool(name='say "hi" \\ \u00e9', schema={"properties": {}, "type": "object"})
    text = walk(constraints.matcher(constraint_of(FORMS["json"], (tool,), parallel=False)), tokenizer, 1)
    assert text is not None
    assert [call.name for call in AnswerParser(FORMS["json"], (tool,)).parse(text).calls] == [tool.name]
