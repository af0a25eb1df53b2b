"""Answers to reasoning, content and calls: which texts are calls, and that cuts change nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml_dflash.model.answer import (
    AnswerEvent,
    AnswerForm,
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    ParsedAnswer,
    ReasoningDelta,
)
from pyggml_dflash.model.answer_parser import AnswerParser, new_call_id
from pyggml_dflash.model.tools import Tool

THINKS: Final = AnswerForm(reasoning=("<think>", "</think>"))
PLAIN: Final = AnswerForm()
BARE: Final = AnswerForm(reasoning=("<think>", "</think>"), bare_calls=True)
TOOLS: Final = (
    Tool(
        name="get_weather",
        schema={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "at": {"type": "object"},
                "tags": {"type": "array"},
                "note": {"type": ["string", "null"]},
            },
        },
    ),
    Tool(name="stop"),
)


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def xml(*parameters: tuple[str, str], name: str = "get_weather") -> str:
    """A call as the templates of Qwen3-Coder and Qwen3.5 write it."""
    inner = "".join(parameter(key, value) for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def as_json(arguments: str, name: str = "get_weather") -> str:
    """A call as the templates of Qwen3 and Hermes write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parser(
    form: AnswerForm = THINKS, *, tools: Sequence[Tool] = TOOLS, is_open: bool = False
) -> AnswerParser:
    ids = (f"id-{n}" for n in itertools.count())
    return AnswerParser(form, tools, is_open=is_open, new_id=lambda: next(ids))


def events_of(pieces: Iterable[str], form: AnswerForm = THINKS, **options: Any) -> list[AnswerEvent]:
    of = parser(form, **options)
    return [*itertools.chain.from_iterable(of.push(piece) for piece in pieces), *of.finish()]


def merged(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Events with neighbouring deltas of one kind put together."""
    whole: list[AnswerEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, (ReasoningDelta, ContentDelta)) and type(last) is type(event):
            assert isinstance(last, (ReasoningDelta, ContentDelta))
            whole[-1] = type(event)(last.text + event.text)
        else:
            whole.append(event)
    return whole


def parts(text: str, form: AnswerForm = THINKS, **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content, and calls with their arguments as values."""
    answer = parser(form, **options).parse(text)
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    return answer.reasoning, answer.content, calls


PARIS: Final = ("get_weather", {"city": "Paris"})
CALL: Final = xml(("city", "Paris"))
ONE: Final = "<tool_call><function=get_weather>"
END: Final = "</function></tool_call>"


# Each text with what it is: reasoning, content, calls. Texts that are no calls stay as they are.
CALLS: Final = {
    "xml": (CALL, "", "", [PARIS]),
    "json": (as_json('{"city": "Paris"}'), "", "", [PARIS]),
    "xml without breaks": (f"{ONE}<parameter=city>Paris</parameter>{END}", "", "", [PARIS]),
    "json without breaks": ('<tool_call>{"name":"stop","arguments":{}}</tool_call>', "", "", [("stop", {})]),
    "json without arguments": ('<tool_call>{"name": "stop"}</tool_call>', "", "", [("stop", {})]),
    "json named parameters": (
        '<tool_call>{"parameters": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        "",
        "",
        [PARIS],
    ),
    "json inside of json": (as_json('"{\\"city\\": \\"Paris\\"}"'), "", "", [PARIS]),
    "no parameters": (xml(name="stop"), "", "", [("stop", {})]),
    "windows breaks": (CALL.replace("\n", "\r\n"), "", "", [PARIS]),
    "types": (
        xml(
            ("city", "5"),
            ("days", "3"),
            ("metric", "True"),
            ("at", '{"lat": 1.5}'),
            ("tags", '["</tool_call>"]'),
            ("note", "null"),
        ),
        "",
        "",
        [
            (
                "get_weather",
                {
                    "city": "5",
                    "days": 3,
                    "metric": True,
                    "at": {"lat": 1.5},
                    "tags": ["</tool_call>"],
                    "note": None,
                },
            )
        ],
    ),
    "a value of several lines": (
        xml(("city", "\n  a\n\n")),
        "",
        "",
        [("get_weather", {"city": "\n  a\n\n"})],
    ),
    "a value that looks like its end": (
        xml(("city", "</parameter or </parameter> of </function> in <parameter=other> <tool_call>")),
        "",
        "",
        [
            (
                "get_weather",
                {"city": "</parameter or </parameter> of </function> in <parameter=other> <tool_call>"},
            )
        ],
    ),
    "a json value that looks like its end": (
        as_json('{"city": "\\"}}</tool_call>{\\\\"}'),
        "",
        "",
        [("get_weather", {"city": '"}}</tool_call>{\\'})],
    ),
    "after content": (f"Let me look.\n\n{CALL}\n", "", "Let me look.", [PARIS]),
    "two": (f"{CALL}\n{as_json('{}', 'stop')}", "", "", [PARIS, ("stop", {})]),
    "content behind": (f"{CALL}\n\nDone.", "", "Done.", [PARIS]),
    "after reasoning": (f"<think>\nHm.\n</think>\n\n{CALL}", "Hm.", "", [PARIS]),
    "after both": (f"<think>Hm.</think>So:\n{CALL}", "Hm.", "So:", [PARIS]),
    "in reasoning that is not closed": (f"<think>Hm.\n{CALL}\n", "Hm.", "", [PARIS]),
    "two in reasoning that is not closed": (f"<think>Hm.\n{CALL}\n{CALL}", "Hm.", "", [PARIS, PARIS]),
    "behind one that broke off": (
        f"{ONE}<parameter=city>P{END}{CALL}",
        "",
        f"{ONE}<parameter=city>P{END}",
        [PARIS],
    ),
    "behind an open tag": (f"<tool_call>{CALL}", "", "<tool_call>", [PARIS]),
    "behind talk of tags": (f"a <tool_call> is {CALL}", "", "a <tool_call> is", [PARIS]),
}

NO_CALLS: Final = {
    "cut short in the tag": "<tool_cal",
    "cut short in the name": "<tool_call>\n<function=get_wea",
    "cut short in a value": f"{ONE}\n<parameter=city>\nPar",
    "cut short before the last tag": CALL.removesuffix("</tool_call>"),
    "cut short in json": as_json('{"city": "Paris"}')[:-20],
    "an unknown function": xml(("city", "Paris"), name="get_time"),
    "an unknown function in json": as_json("{}", "get_time"),
    "a break in the parameter tag": f"{ONE}<parameter=\ncity>Paris</parameter>{END}",
    "a break in a later parameter tag": (
        f"{ONE}<parameter=note>a</parameter>\n<parameter=\ncity>Paris</parameter>{END}"
    ),
    "a parameter tag without its end": f"{ONE}<parameter=city\nParis\n</parameter>{END}",
    "a parameter without a name": f"{ONE}<parameter=>Paris</parameter>{END}",
    "a parameter that is not closed": f"{ONE}<parameter=city>Paris{END}",
    "a parameter inside another": f"{ONE}<parameter=city>a\n<parameter=days>1</parameter>{END}",
    "a parameter twice": f"{ONE}<parameter=days>1</parameter><parameter=days>1</parameter>{END}",
    "text between parameters": f"{ONE}<parameter=days>1</parameter> and{END}",
    "text behind the function": f"{ONE}</function> and</tool_call>",
    "text before the function": f"<tool_call>call: <function=stop>{END}",
    "a value of another type": f"{ONE}<parameter=days>many</parameter>{END}",
    "json that is broken": as_json("{city: 1}"),
    "json with a quote missing": as_json('{"city": "Paris}'),
    "json with a raw break in a string": as_json('{"city": "a\nb"}'),
    "json with NaN": as_json('{"days": NaN}'),
    "json with half a character": as_json('{"city": "\udcff"}'),
    "json that closes what is not open": '<tool_call>{"name": "stop"]}</tool_call>',
    "arguments that are no object": as_json("[1]"),
    "arguments that are text": as_json('"now"'),
    "a name that is no text": '<tool_call>{"name": ["stop"], "arguments": {}}</tool_call>',
    "two objects": '<tool_call>{"name": "stop"}{"name": "stop"}</tool_call>',
    "an object too deep": as_json('{"city": ' + "[" * 5000 + "]" * 5000 + "}"),
    "nothing inside": "<tool_call></tool_call>",
    "talk of tags": "Write <tool_call>\n then </tool_call>, and <think> too.",
    "a bare call": '{"name": "stop", "arguments": {}}',
    "space at the end": "a \n ",
    "space at the start": "\n a",
    "space only": " \n",
    "nothing": "",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_keeps_its_form_is_one(name: str) -> None:
    text, *wanted = CALLS[name]
    assert list(parts(text)) == wanted


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_is_no_call_is_the_text_it_was(name: str) -> None:
    text = NO_CALLS[name]
    assert parts(text) == ("", text, [])
    assert parts(f"<think>R</think>{text}") == ("R", text.lstrip(), [])


@pytest.mark.parametrize("name", [*CALLS, *NO_CALLS])
def test_a_cut_anywhere_changes_nothing(name: str) -> None:
    text = CALLS[name][0] if name in CALLS else NO_CALLS[name]
    text = text[:400]  # the deep one
    for form, is_open in [(PLAIN, False), (THINKS, False), (THINKS, True), (BARE, True)]:
        whole = merged(events_of([text], form, is_open=is_open))
        assert merged(events_of(text, form, is_open=is_open)) == whole
        for at in range(len(text) + 1):
            assert merged(events_of([text[:at], text[at:]], form, is_open=is_open)) == whole


SNIPPETS: Final = (
    "<tool_call>",
    "</tool_call>",
    "<function=get_weather>",
    "<function=stop>",
    "</function>",
    "<parameter=city>",
    "<parameter=days>",
    "<parameter=",
    "</parameter>",
    "</parameter",
    "<think>",
    "</think>",
    '{"name": "stop", "arguments": {}}',
    '{"name": "',
    '"',
    "\\",
    "{",
    "}",
    "<",
    ">",
    "1",
    "\n",
    " ",
    "text",
    "\U0001f642",
    CALL,
    xml(name="stop"),
)
FORMS: Final = st.sampled_from([PLAIN, THINKS, BARE])


@given(st.lists(st.sampled_from(SNIPPETS), max_size=24).map("".join), FORMS, st.booleans(), st.data())
def test_any_text_comes_out_the_same_from_any_pieces(
    text: str, form: AnswerForm, is_open: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = events_of([text], form, is_open=is_open)
    assert merged(events_of(pieces, form, is_open=is_open)) == merged(whole)
    answer = ParsedAnswer.gather(whole)
    assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
    if not answer.calls and not answer.reasoning and form is PLAIN:
        assert answer.content == text


@given(st.lists(st.sampled_from(SNIPPETS), max_size=24).map("".join), FORMS, st.booleans(), st.data())
def test_reasoning_and_content_tell_where_they_stand(
    text: str, form: AnswerForm, is_open: bool, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(text)))
    end = 0
    for event in events_of([text[:at], text[at:]], form, is_open=is_open):
        if isinstance(event, (ReasoningDelta, ContentDelta)):
            assert end <= event.start
            end = event.start + len(event.text)
            assert text[event.start : end] == event.text


def without_space(text: str) -> str:
    return "".join(text.split())


@given(st.lists(st.sampled_from(SNIPPETS), max_size=24).map("".join))
def test_an_answer_without_calls_is_its_two_texts_and_the_tags_around_one(text: str) -> None:
    reasoning, content, calls = parts(text)
    if calls:
        return
    block = "" if not text.lstrip().startswith("<think>") else f"<think>{reasoning}"
    kept = {without_space(block + content), without_space(f"{block}</think>{content}")}
    assert without_space(text) in kept
    assert block or content == text


def test_events_come_in_order_and_a_call_is_whole() -> None:
    assert merged(events_of(f"<think>a</think>b{CALL}{xml(name='stop')}")) == [
        ReasoningDelta("a"),
        ContentDelta("b"),
        CallStart(0, "id-0", "get_weather"),
        CallArguments(0, '{"city": "Paris"}'),
        CallEnd(0),
        CallStart(1, "id-1", "stop"),
        CallArguments(1, "{}"),
        CallEnd(1),
    ]


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    of = parser()
    assert of.push("<thi") == []
    assert of.push("nk>\nSo") == [ReasoningDelta("So")]
    assert of.push(" it </") == [ReasoningDelta(" it")]
    assert of.push("b> is") == [ReasoningDelta(" </b> is")]
    assert of.push("</think>\n") == []
    assert of.push("\nYes <tool") == [ContentDelta("Yes")]
    assert of.push("_call>") == []
    assert of.push(" is a tag") == [ContentDelta(" <tool_call>"), ContentDelta(" is a tag")]
    assert of.push("") == of.finish() == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{name}",
        '<tool_call>{"name": name}',
        "<tool_call><function=other>",
        f"{ONE}<parameter=days>x</parameter><parameter=",
        f"{ONE}<parameter=city>x{END}",
        '<tool_call>{"a": "b\n',
    ],
)
def test_a_form_that_broke_is_text_at_once(text: str) -> None:
    given_out = parser().push(text)
    assert given_out
    assert isinstance(given_out[0], ContentDelta)


def test_the_prompt_may_have_opened_the_block() -> None:
    assert parts("Hm.\n</think>\n\nYes", is_open=True) == ("Hm.", "Yes", [])
    assert parts("<think>\nHm.</think>Yes", is_open=True) == ("Hm.", "Yes", [])
    assert parts("</think>Yes", is_open=True) == ("", "Yes", [])
    assert parts("Hm.", is_open=True) == ("Hm.", "", [])
    assert parts("Hm.</think>Yes") == ("", "Hm.</think>Yes", [])
    assert THINKS.is_open("<|im_start|>assistant\n<think>\n")
    assert not THINKS.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINKS.is_open("What does <think> mean?<|im_start|>assistant\n")
    assert not PLAIN.is_open("<think>\n")


def test_calls_inside_a_block_that_goes_on_are_reasoning() -> None:
    for behind in ("</think>Yes", "</think>", " or not"):
        inside = f"Maybe {CALL}\n{CALL}"
        rest, _, content = behind.partition("</think>")
        assert parts(f"{inside}{behind}", is_open=True) == (inside + rest, content, [])


def test_tags_of_other_models_are_known() -> None:
    form = AnswerForm(reasoning=("[THINK]", "[/THINK]"))
    assert parts("[THINK]a[/THINK]b<think>", form) == ("a", "b<think>", [])


def test_without_tools_nothing_is_a_call() -> None:
    assert parts(f"<think>a</think>{CALL}", tools=()) == ("a", CALL, [])


@pytest.mark.parametrize("behind", ["", "\n", " \n "])
def test_a_bare_call_is_the_whole_answer(behind: str) -> None:
    text = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    assert parts(text + behind, BARE) == ("", "", [PARIS])
    assert parts(f"<think>a</think>\n{text}", BARE) == ("a", "", [PARIS])
    assert parts(f"{text}{behind}; or so", BARE) == ("", f"{text}{behind}; or so", [])
    assert parts(text + behind, PLAIN) == ("", text + behind, [])
    assert parts('{"answer": 5}', BARE) == ("", '{"answer": 5}', [])


def test_ids_differ() -> None:
    assert len({new_call_id() for _ in range(1000)}) == 1000
