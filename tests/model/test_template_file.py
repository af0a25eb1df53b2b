"""A template that a user gives works, or is refused by file and line before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import EngineOptions, UsageError, fit_report
from pyggml_dflash.model.template_file import MAX_TEMPLATE_BYTES, read_template
from tests.engine.tiny import opened
from tests.model.test_chat import PLAIN, STRICT

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
GOOD = [
    PLAIN,
    STRICT,
    LOOP,
    "{% generation %}" + LOOP + "{% endgeneration %}",
    "{{ bos_token }}{{ messages[0]['content'] | trim }}{% if tools %}{{ tools | tojson }}{% endif %}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + LOOP,
]


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as raised:
        read_template(path)
    start, _, problem = str(raised.value).partition("; ")
    assert start == f"chat_template is {str(path)!r}"
    return problem


@pytest.mark.parametrize("source", GOOD)
def test_a_template_that_can_be_used_is_read_as_it_stands(source: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(source, encoding="utf-8-sig")  # editors may put a mark of the order of bytes in front
    assert read_template(path) == source
    assert read_template(None) is None


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (b"", "it does not read 'messages', which the conversation is in"),
        (b"{{ prompt }}", "it does not read 'messages', which the conversation is in"),
        (
            b"{% set messages = [] %}{{ messages }}",
            "it does not read 'messages', which the conversation is in",
        ),
        (b"a\n{% for m in messages %}\n{{ m.content }", "line 3: unexpected '}'"),
        (b"a\n\n{% for m in messages %}x", "line 3: Unexpected end of template."),
        (b"{{ messages }}\n{{ messages | shout }}", "line 2: No filter named 'shout'."),
        (b"{{ messages }}\n\n{% include 'x' %}", "line 3: a user's message makes it fail: "),
        (b"{% for m in messages %}\n{{ m.text.x }}{% endfor %}", "line 2: a user's message makes it fail: "),
        (b"{{ messages }}\n{{ raise_exception('never') }}", "a user's message makes it fail: never"),
        (b"{{ messages }}\n{{ ''.__class__.__mro__ }}", "line 2: a user's message makes it fail: access to"),
        (
            b"{{ messages[0].role }}: hello",
            "its prompt for a user's message is without what the message says",
        ),
        (b"{{ messages }}" + b"(" * 9 + b"\n\n\xff\xfe", "line 3: not UTF-8, there is a byte 0xff"),
        (LOOP.encode("utf-16"), "line 1: not UTF-8, there is a byte 0xff"),
        (b"{{ messages }}{{ " + b"(" * 5000 + b")" * 5000 + b" }}", "it cannot be compiled: "),
        (b" " * MAX_TEMPLATE_BYTES + LOOP.encode(), "it is larger than 1024 KiB, so it is no chat template"),
        (b"{{ messages }}\n{{ [1] | slice(10000000000) | list }}", "more than 100000 columns or items"),
    ],
    ids=lambda value: repr(value[-30:]) if isinstance(value, bytes) else "",
)
def test_what_is_wrong_is_told_with_its_line(source: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(source)
    assert problem in refusal(path)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.jinja") == "there is no such file"
    assert refusal(tmp_path) == "it is a folder; name a file in it"
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file" / "x") == "it cannot be read: Not a directory"
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "it is no regular file"


@pytest.mark.parametrize("given", ["", b"x", 7, "a\0b"])
def test_the_argument_is_the_path_of_a_file(given: Any) -> None:
    with pytest.raises(UsageError, match=r"chat_template is .*; it must be the path of a file"):
        opened(None, chat_template=given)


def test_it_is_told_before_the_model_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    with pytest.raises(UsageError, match="there is no such file"):
        opened(tmp_path / "no.gguf", chat_template=path)
    with pytest.raises(UsageError, match="there is no such file"):
        fit_report(EngineOptions(model=tmp_path / "no.gguf", chat_template=path))
