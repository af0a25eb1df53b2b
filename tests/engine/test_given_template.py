"""A template from a file takes the place of the model's own, in all that is made of one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from pyggml_dflash import UsageError
from tests.engine.tiny import LLAMA, opened

USER: Final = [{"role": "user", "content": "Say hello."}]
TOOL: Final = {"type": "function", "function": {"name": "find", "parameters": {}}}
GIVEN: Final = """\
{% if tools %}[{{ tools | tojson }}]<tool_call><function={% endif %}
{% for m in messages %}({{ m.role }}) {{ m.content }}
{% endfor %}
{% if add_generation_prompt %}(model) {{ '[THINK]' if enable_thinking else '' }}{% endif %}
{# [/THINK] #}"""
CALL: Final = "<tool_call><function=find><parameter=x>1</parameter></function></tool_call>"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "given.jinja"
    path.write_text(GIVEN)
    return path


def test_it_writes_the_prompts(given: Path) -> None:
    with opened(None, max_ctx=512, chat_template=str(given)) as engine:
        prompt = engine.render_chat(USER)
        assert prompt == "(user) Say hello.\n(model) "
        assert engine.info.chat_template_file == engine.options.chat_template == given
        answer = engine.chat(USER, max_tokens=6)
        tokens = engine.tokenize(prompt, add_special=False)
        assert answer.usage.prompt_tokens == len(tokens)
        with opened(None, max_ctx=512) as own:
            assert own.info.chat_template_file is None
            assert own.render_chat(USER) != prompt
            assert own.generate(tokens, max_tokens=6).tokens == answer.tokens


def test_calls_and_reasoning_are_read_as_it_says(given: Path) -> None:
    with opened(None, max_ctx=512, chat_template=given) as engine:
        assert engine.info.tools_supported
        assert engine.info.reasoning_supported
        assert "find" in engine.render_chat(USER, tools=[TOOL])
        open_prompt = engine.render_chat(USER, reasoning=True)
        block = engine.reasoning_block(open_prompt)
        assert block is not None
        assert (block.opens, block.closes, block.is_open) == ("[THINK]", "[/THINK]", True)
        parsed = engine.answer_parser(open_prompt, tools=[TOOL]).parse(f"Well.[/THINK]{CALL}")
        assert parsed.reasoning == "Well."
        assert [(call.name, call.arguments) for call in parsed.calls] == [("find", '{"x": 1}')]
    with opened(None, max_ctx=512) as own, pytest.raises(UsageError, match="no place for them"):
        own.render_chat(USER, tools=[TOOL])


def test_a_model_without_a_template_gets_chat_by_it(given: Path) -> None:
    with opened(LLAMA, max_ctx=128) as engine:
        assert not engine.info.has_chat_template
        with pytest.raises(UsageError, match="no chat template"):
            engine.chat(USER)
    with opened(LLAMA, max_ctx=128, chat_template=given) as engine:
        assert engine.info.has_chat_template
        assert engine.chat(USER, max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_parking_keeps_it_whatever_becomes_of_the_file(given: Path) -> None:
    with opened(LLAMA, max_ctx=128, chat_template=given) as engine:
        prompt = engine.render_chat(USER)
        for change in (lambda: given.write_text("{{ messages[0].content }} anew"), given.unlink):
            change()
            engine.park()
            engine.unpark()
            assert engine.render_chat(USER) == prompt
            assert engine.info.chat_template_file == given
