"""What a table of members documents is what it checks."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.errors import UsageError
from pyggml_dflash.openai.fields import CHAT, COMPLETION
from pyggml_dflash.openai.values import Value, whole
from pyggml_dflash.serve.messages_bodies import COUNTED, MESSAGES
from pyggml_dflash.serve.responses_bodies import RESPONSES
from tests.openai.drawn import JUNK, damaged, few

TABLES = {
    "chat": CHAT,
    "completion": COMPLETION,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "counted": COUNTED,
}


def accepts(value: Value, given: Any) -> bool:
    try:
        value.check("", given)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("name", TABLES)
def test_a_body_is_accepted_if_its_schema_describes_it(name: str) -> None:
    table = TABLES[name]
    schema = jsonschema_rs.validator_for({**table.schema})
    seen: set[bool] = set()

    @given(few(table.schema) | damaged(few(table.schema)) | JUNK)
    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    def check(body: Any) -> None:
        seen.add(accepts(table, body))
        assert accepts(table, body) == schema.is_valid(body), body

    check()
    assert seen == {True, False}


@given(st.integers() | st.booleans() | st.floats())
def test_a_whole_number_is_neither_a_flag_nor_a_fraction(given: Any) -> None:
    assert accepts(whole(0, 9), given) == (type(given) is int and 0 <= given <= 9)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "user"}], "stop": ["a", ""]}, "stop[1]"),
        ({"messages": [{"role": "user"}], "stop": ["a"] * 17}, "stop"),
        ({"messages": [{"role": "user"}], "logit_bias": {"7": None}}, "logit_bias.7"),
        ({"messages": [{"role": "user"}], "top_p": 0}, "top_p"),
    ],
)
def test_a_refusal_has_the_path_of_the_member(body: Any, param: str) -> None:
    with pytest.raises(UsageError) as refused:
        CHAT.check("", body)
    assert refused.value.param == param
    assert str(refused.value).startswith(param)
