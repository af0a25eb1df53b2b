"""A server of a model with a chat template from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.engine.tiny import opened
from tests.serve.live import CHAT, STORY, Live, live

GIVEN: Final = """\
{% if tools %}<tool_call><function={{ tools[0].function.name }}{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{% if add_generation_prompt %}<answer>{% endif %}"""
TOOL: Final = {"type": "function", "function": {"name": "find", "parameters": {}}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("templates") / "given.jinja"
    path.write_text(GIVEN)
    return path


@pytest.fixture(scope="module")
def templated(path: Path) -> Iterator[Live]:
    with opened(None, max_ctx=512, chat_template=path) as engine, live(engine) as server:
        yield server


def test_prompts_are_its_own_also_after_parking(templated: Live) -> None:
    expected = f"<user>{STORY[0]['content']}<answer>"
    assert templated.post("/apply-template", {"messages": STORY}).json() == {"prompt": expected}
    assert templated.post("/admin/park", {}).status_code == 200
    assert templated.post("/admin/unpark", {}).status_code == 200
    answer = templated.post(CHAT, {"messages": STORY, "max_tokens": 2}).json()
    n_prompt = len(templated.engine.tokenize(expected, add_special=False))
    assert answer["usage"]["prompt_tokens"] == n_prompt


def test_props_tell_its_name_and_what_it_has_a_place_for(templated: Live, server: Live, path: Path) -> None:
    props, own = (found.get("/props").json() for found in (templated, server))
    assert (props["model"]["chat_template_file"], own["model"]["chat_template_file"]) == (path.name, None)
    assert (props["capabilities"]["tools"], own["capabilities"]["tools"]) == (True, False)
    assert (props["capabilities"]["reasoning"], own["capabilities"]["reasoning"]) == (False, True)


def test_tools_may_be_given_where_it_has_a_place_for_them(templated: Live, server: Live) -> None:
    body = {"messages": STORY, "tools": [TOOL], "max_tokens": 2}
    assert server.post(CHAT, body).status_code == 400
    assert templated.post(CHAT, body).status_code == 200
