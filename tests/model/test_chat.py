"""Messages to prompts: what templates may do, what they are given, and how a refusal is told."""

from __future__ import annotations

import datetime
import json
import re
from importlib import resources
from typing import Any

import pytest

from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError, UsageError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model import template_sandbox
from pyggml_dflash.model.answer import AnswerForm
from pyggml_dflash.model.chat import ChatTemplate
from pyggml_dflash.model.tokenizer import Tokenizer
from tests.model.vocabularies import DATA, byte_level, metadata_of

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "Now rhyme."}
DEVELOPER = {"role": "developer", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

# Says of every message what it is, and nothing else.
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# Strict as Qwen3.5's: the system message comes first, and somebody has to ask something.
STRICT = """
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- m.role + ': ' + m.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    metadata = byte_level(added=[("<s>", 3), ("</s>", 3)])
    ids = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257}
    return Tokenizer.from_metadata(metadata | ids)


def render(source: str, tokenizer: Tokenizer, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, tokenizer).render(list(messages) or [USER], **options)


def test_the_shipped_template_writes_the_reference_prompts() -> None:
    cases = json.loads((DATA / "chat/pico_prompts.json").read_text(encoding="utf-8"))["cases"]
    with (
        resources.as_file(resources.files("pyggml_dflash") / "models/pico-q8_0.gguf") as path,
        GgufFile.open(path) as file,
    ):
        template = ChatTemplate.from_metadata(file.metadata, Tokenizer.from_metadata(file.metadata))
    chats = [case["prompt"] for case in cases if case["prompt"].startswith("<|im_start|>")]
    assert len(chats) == 8
    for prompt in chats:
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", prompt, re.DOTALL)
        messages = [{"role": role, "content": content} for role, content in turns]
        assert template.render(messages) == template.render(messages, reasoning=False) == prompt
        assert template.render(messages, reasoning=True).endswith("<|im_start|>assistant\n<think>\n")
    assert template.reasoning_supported


def test_a_file_with_its_own_template_uses_it() -> None:
    metadata = metadata_of("qwen35-tiny-Q8_0")
    template = ChatTemplate.from_metadata(metadata, Tokenizer.from_metadata(metadata))
    assert template.render([USER]) == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant"
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>"
    assert not template.reasoning_supported


def test_chatml_stands_in_where_the_vocabulary_knows_it() -> None:
    metadata = byte_level(added=[("<|im_start|>", 3), ("<|im_end|>", 3)])
    template = ChatTemplate.from_metadata(metadata, Tokenizer.from_metadata(metadata))
    assert template.render([SYSTEM, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([ASSISTANT], add_generation_prompt=False) == (
        "<|im_start|>assistant\nhello<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (None, AnswerForm()),
        (PLAIN, AnswerForm(bare_calls=True)),
        (STRICT, AnswerForm(reasoning=("<think>", "</think>"), bare_calls=True)),
        ("{{ '<tool_call>' }}", AnswerForm()),
        ("{{ '[THINK]a[/THINK]<tool_call>' }}", AnswerForm(reasoning=("[THINK]", "[/THINK]"))),
    ],
)
def test_a_template_tells_how_answers_are_written(
    tokenizer: Tokenizer, source: str | None, form: AnswerForm
) -> None:
    assert ChatTemplate(source, tokenizer).form == form


def test_the_prompt_tells_whether_the_answer_begins_in_a_reasoning_block(tokenizer: Tokenizer) -> None:
    form = ChatTemplate(STRICT, tokenizer).form
    assert form.is_open(render(STRICT, tokenizer))
    assert not form.is_open(render(STRICT, tokenizer, reasoning=False))


def test_without_a_template_the_way_out_is_named(tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_metadata(byte_level(), tokenizer)
    assert not template.reasoning_supported
    with pytest.raises(UsageError, match="no chat template; --raw"):
        template.render([USER])


def test_a_template_must_be_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(DamagedFileError, match=r"tokenizer\.chat_template is '7'"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 7}, tokenizer)


@pytest.mark.parametrize(
    "source",
    [
        "a\n{% for %}",
        "a\n{{ messages | no_such_filter }}",
        "{% if x %}" * 300 + "{% endif %}" * 300,
        "{{" + "(" * 9999,
    ],
)
def test_a_template_that_does_not_compile_is_told_when_it_is_used(tokenizer: Tokenizer, source: str) -> None:
    template = ChatTemplate.from_metadata({"tokenizer.chat_template": source}, tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"chat template .*--raw"):
        template.render([USER])


def test_blocks_leave_no_lines_behind(tokenizer: Tokenizer) -> None:
    source = "  {% if true %}\na\n  {% endif %}\nb\n"
    assert render(source, tokenizer) == "a\nb"


def test_loop_controls_and_generation_blocks_are_understood(tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% if loop.index0 == 3 %}"
        "{% break %}{% endif %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    )
    messages = [{"role": "user", "content": str(i)} for i in range(5)]
    assert render(source, tokenizer, *messages) == "[0][2]"


def test_json_is_plain(tokenizer: Tokenizer) -> None:
    message = {**USER, "data": {"b": "<\u00e9>'", "a": [1]}}
    assert render("{{ messages[0].data | tojson }}", tokenizer, message) == '{"b": "<\u00e9>\'", "a": [1]}'
    assert render("{{ messages[0].data | tojson(indent=1) }}", tokenizer, message) == (
        '{\n "b": "<\u00e9>\'",\n "a": [\n  1\n ]\n}'
    )


def test_the_date_is_todays(tokenizer: Tokenizer) -> None:
    before = datetime.datetime.now().strftime("%d %b %Y")
    date = render("{{ strftime_now('%d %b %Y') }}", tokenizer)
    assert date in (before, datetime.datetime.now().strftime("%d %b %Y"))


def test_bos_and_eos_are_given_as_text(tokenizer: Tokenizer) -> None:
    source = "{{ bos_token + messages[0].content + eos_token }}"
    assert render(source, tokenizer) == "<s>hi</s>"
    assert render(source, Tokenizer.from_metadata(byte_level())) == "hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 'ab' * 8000000 }}",
        "{{ 8000000 * [1, 2] }}",
        "{{ 10 ** 100000 }}",
        "{% for i in range(9000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ messages[0].content.no.such.field }}",
        "{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_cannot_break_out_or_run_away(tokenizer: Tokenizer, source: str) -> None:
    with pytest.raises(UsageError, match=r"chat template|longer than"):
        render(source, tokenizer)


ENDLESS = {
    "loops": "{% for a in 'a' * 10000 %}{% for b in 'b' * 100000 %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
}
GROWING = {
    "+": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "~": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "number": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "block": "{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
    "literal": "{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
    "macro": "{% macro f() %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endmacro %}{{ f() }}",
    "padding": "{{ 'a'.ljust(10 ** 10) }}",
    "filter": "{{ 'a' | center(10 ** 10) }}",
    "constant": "{{ [1] | slice(10000000000) | list }}",
    "words": "{{ lipsum(n=1000000) }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_stopped(
    source: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "RENDER_S", 0.05)
    with pytest.raises(UsageError, match="the chat template does not end"):
        render(source, tokenizer)
    assert render(PLAIN, tokenizer) == "user: hi\n"


@pytest.mark.parametrize("source", GROWING.values(), ids=GROWING)
def test_what_a_template_makes_cannot_grow_without_bounds(source: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"chat template (refuses|writes more)"):
        render(source, tokenizer)


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{{ 2 ** 65 }}", "a power is of more than 4294967296 or to more than 64"),
        ("{{ 5 * 'ab' * 1000000 }}", "longer than 8388608 characters or items"),
        ("{{ [1] * 9000000 }}", "longer than 8388608 characters or items"),
        ("{{ 2 ** 64 * " + "2 ** 64 * " * 99 + "1 }}", "a product has more than 4096 bits"),
        ("{{ '\\t'.expandtabs(100001) }}", "more than 100000 columns or items"),
        ("{{ '\\t'.expandtabs(tabsize=100001) }}", "more than 100000 columns or items"),
    ],
)
def test_what_is_too_much_for_a_template_is_told_with_what_would_work(
    source: str, limit: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UsageError, match=re.escape(limit)):
        render(source, tokenizer)


def test_bounds_change_nothing_for_a_template_that_keeps_them(tokenizer: Tokenizer) -> None:
    source = (
        "{% macro line(m) %}{{ m.role ~ ': ' ~ m.content ~ 1 }}{{ caller() if caller else '' }}{% endmacro %}"
        "{% for m in messages recursive %}{% call line(m) %}!{% endcall %}"
        "{{ loop.index * 2 }}{{ [1] + [2] }}{{ 'ab' | center(6) }}{{ m | tojson(indent=1) | length }}"
        "{% else %}none{% endfor %}"
    )
    assert render(source, tokenizer) == "user: hi1!2[1, 2]  ab  37"


def test_a_template_runs_no_expression_before_it_renders(tokenizer: Tokenizer) -> None:
    assert render("{% if false %}{{ 'a' * 99999999 }}{% endif %}ok", tokenizer) == "ok"


def test_reasoning_sets_the_templates_own_switch(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(STRICT, tokenizer)
    assert template.reasoning_supported
    assert template.render([USER]).endswith("assistant: <think>\n")
    assert template.render([USER], reasoning=True).endswith("assistant: <think>\n")
    assert template.render([USER], reasoning=False).endswith("</think>\n\n")
    assert render("{{ thinking }}", tokenizer, reasoning=True) == "True"


def test_reasoning_is_refused_where_nothing_switches_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="reasoning is True"):
        render(PLAIN, tokenizer, reasoning=True)
    with pytest.raises(UsageError, match="reasoning is False"):
        render(PLAIN + "<think>\n", tokenizer, reasoning=False)
    assert render(PLAIN, tokenizer, reasoning=False) == "user: hi\n"


def test_extra_variables_are_used_or_refused(tokenizer: Tokenizer) -> None:
    source = PLAIN + "{{ effort }} {{ enable_thinking }}"
    assert render(source, tokenizer, extra={"effort": "low"}) == "user: hi\nlow "
    for name in ("efort", "messages", "raise_exception", "bos_token"):
        with pytest.raises(UsageError, match=f"{name!r}; it reads effort, enable_thinking"):
            render(source, tokenizer, extra={name: 1})
    with pytest.raises(UsageError, match="reasoning is True, but 'enable_thinking' is False"):
        render(source, tokenizer, reasoning=True, extra={"enable_thinking": False})
    with pytest.raises(UsageError, match="does not read 'a'; it reads nothing"):
        render(PLAIN, tokenizer, extra={"a": 1})


def test_tools_are_used_or_refused(tokenizer: Tokenizer) -> None:
    source = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
    assert render(source, tokenizer, tools=[TOOL]) == json.dumps([TOOL]) + "user: hi\n"
    assert render(source, tokenizer, tools=[]) == "user: hi\n"
    with pytest.raises(UsageError, match="tools cannot be used"):
        render(PLAIN, tokenizer, tools=[TOOL])
    with pytest.raises(UsageError, match=r"tools\[1\] is 'x'"):
        render(source, tokenizer, tools=[TOOL, "x"])
    for wrong in (5, 0, "x", "", TOOL, {}):  # some of which look like no tools at all
        with pytest.raises(UsageError, match=r"tools is .*; it must be a list of objects"):
            render(source, tokenizer, tools=wrong)


def test_leading_system_messages_become_one(tokenizer: Tokenizer) -> None:
    assert render(STRICT, tokenizer, SYSTEM, LATE, USER, add_generation_prompt=False) == (
        "system: Be brief.\n\nNow rhyme.\nuser: hi\n"
    )


def test_a_developer_is_a_system(tokenizer: Tokenizer) -> None:
    assert render(STRICT, tokenizer, SYSTEM, DEVELOPER, USER, add_generation_prompt=False) == (
        "system: Be brief.\n\nBe kind.\nuser: hi\n"
    )


def test_a_late_system_message_stays_where_it_is_if_the_template_takes_it(tokenizer: Tokenizer) -> None:
    assert render(PLAIN, tokenizer, SYSTEM, USER, ASSISTANT, LATE, USER) == (
        "system: Be brief.\nuser: hi\nassistant: hello\nsystem: Now rhyme.\nuser: hi\n"
    )


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([SYSTEM, USER, ASSISTANT, LATE, USER], 3),
        ([SYSTEM, LATE, USER, ASSISTANT, DEVELOPER, USER], 4),
        ([USER, LATE], 1),
        ([USER, ASSISTANT, SYSTEM, USER, LATE, USER], 2),
    ],
)
def test_a_late_system_message_that_is_refused_is_named_by_its_place(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], index: int
) -> None:
    with pytest.raises(UsageError, match=rf"messages\[{index}\]: System message must be at the beginning\.$"):
        render(STRICT, tokenizer, *messages)


def test_a_refusal_of_the_whole_says_what_the_template_says(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="No user query found in messages"):
        render(STRICT, tokenizer, SYSTEM, ASSISTANT)


def test_an_error_inside_the_template_is_told_with_the_message_it_meets(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.role + m.name }}{% endfor %}"
    with pytest.raises(UsageError, match=r"messages\[1\]: .*name"):
        render(source, tokenizer, {**USER, "name": "Ann"}, USER)


def test_unknown_roles_and_keys_reach_the_template(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.role }} {{ m.tool_call_id }} {{ m.content }}\n{% endfor %}"
    message = {"role": "tool", "tool_call_id": "7", "content": "ok"}
    assert render(source, tokenizer, USER, message) == "user  hi\ntool 7 ok\n"


def test_text_parts_are_joined_by_line_breaks(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PLAIN, tokenizer, {"role": "user", "content": parts}) == "user: a\nb\n"
    assert render(PLAIN, tokenizer, {"role": "user", "content": []}) == "user: \n"


def test_tool_calls_reach_the_template_with_their_arguments_read(tokenizer: Tokenizer) -> None:
    source = (
        "{% for c in messages[1].tool_calls %}{{ (c.function or c).arguments.a }}{% endfor %}"
        "|{{ messages[1].content }}"
    )
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"type": "function", "function": {"name": "f", "arguments": {"a": 2}}},
        {"name": "f", "arguments": '{"a": 3}'},
        {"name": "f", "arguments": ""},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert render(source, tokenizer, USER, message) == "123|"


def test_messages_are_not_changed(tokenizer: Tokenizer) -> None:
    messages = [SYSTEM, DEVELOPER, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    render(STRICT, tokenizer, *messages)
    assert json.dumps(messages) == before


BAD_MESSAGES: list[tuple[object, str]] = [
    ([], r"messages is \[\]"),
    ("hi", "messages is 'hi'"),
    (USER, "messages is {"),
    ([USER, "hi"], r"messages\[1\] is 'hi'"),
    ([{"content": "hi"}], r"messages\[0\]\.role is None"),
    ([USER, {"role": "", "content": "hi"}], r"messages\[1\]\.role is ''"),
    ([{"role": 1, "content": "hi"}], r"messages\[0\]\.role is 1"),
    ([USER, {"role": "user"}], r"messages\[1\]\.content is None"),
    ([USER, {"role": "assistant", "content": None}], r"messages\[1\]\.content is None"),
    ([{"role": "user", "content": None, "tool_calls": [TOOL]}], r"messages\[0\]\.content is None"),
    ([{"role": "user", "content": 7}], r"messages\[0\]\.content is 7"),
    ([{"role": "user", "content": b"hi"}], r"messages\[0\]\.content is b'hi'"),
    ([{"role": "user", "content": ["hi"]}], r"messages\[0\]\.content\[0\] is of type None"),
    (
        [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
        r"messages\[1\]\.content\[1\] is of type 'image_url'; only 'text'",
    ),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"messages\[0\]\.content\[0\]\.text is 1"),
    ([{**ASSISTANT, "tool_calls": "f"}], r"messages\[0\]\.tool_calls is 'f'"),
    (
        [{**ASSISTANT, "tool_calls": [{"function": {"arguments": "{"}}]}],
        r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is '\{'",
    ),
    ([{**ASSISTANT, "tool_calls": [{"arguments": "[1]"}]}], r"messages\[0\]\.tool_calls\[0\]\.arguments is"),
]


@pytest.mark.parametrize(("messages", "problem"), BAD_MESSAGES)
def test_a_message_that_cannot_be_used_is_named_by_its_place(
    tokenizer: Tokenizer, messages: Any, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        ChatTemplate(PLAIN, tokenizer).render(messages)
