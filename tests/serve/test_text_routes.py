"""Between texts and tokens over HTTP, and what changes the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyggml_dflash import Engine
from pyggml_dflash.serve.app import create_app
from pyggml_dflash.serve.settings import ServeOptions
from tests.engine.tiny import LLAMA, opened
from tests.serve.live import STORY, Live, live
from tests.serve.told import telling


def test_tokens_are_the_engines(server: Live, pico: Engine) -> None:
    text = "Once<|im_end|> upon 😀"
    for fields in ({}, {"parse_special": False}, {"add_special": True}):
        options = {"add_special": False, **fields}
        tokens = server.post("/tokenize", {"content": text, **fields}).json()["tokens"]
        assert tokens == pico.tokenize(text, **options)
        assert server.post("/detokenize", {"tokens": tokens}).json()["content"].endswith(text)
    plain = pico.tokenize(text, add_special=False)
    skipped = server.post("/detokenize", {"tokens": plain, "skip_special": True}).json()["content"]
    assert skipped == "Once upon 😀"


def test_the_start_of_a_text_is_added_when_asked_for() -> None:
    with opened(LLAMA, max_ctx=64) as engine, live(engine) as server:
        bare, started = (
            server.post("/tokenize", {"content": "a", "add_special": add}).json()["tokens"]
            for add in (False, True)
        )
        assert (bare, started) == (engine.tokenize("a", add_special=False), engine.tokenize("a"))


def test_a_piece_that_is_no_text_is_its_bytes(tmp_path: Path) -> None:
    with telling(tmp_path, "answer") as server:  # its tokens are bytes
        pieces = server.post("/tokenize", {"content": "ab😀", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["a", "b", *([byte] for byte in "😀".encode())]


def test_a_prompt_is_the_templates(server: Live, pico: Engine) -> None:
    for fields, options in (
        ({}, {}),
        ({"reasoning": True}, {"reasoning": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ):
        answer = server.post("/apply-template", {"messages": STORY, **fields})
        assert answer.json() == {"prompt": pico.render_chat(STORY, **options)}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "content is missing"),
        ("/tokenize", {"content": 5}, "content is 5"),
        ("/tokenize", {"content": "a", "text": "b"}, "text is not known here"),
        ("/detokenize", {"tokens": [4096]}, "token 0 is 4096; token ids are whole numbers from 0 to 4095"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0] is -1"),
        ("/detokenize", {"tokens": "ab"}, "tokens is 'ab'"),
        ("/apply-template", {"messages": []}, "messages is []"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "messages[0].content is None"),
    ],
)
def test_what_cannot_be_used_is_refused(server: Live, path: str, body: dict[str, Any], says: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_trim_is_the_engines(server: Live) -> None:
    answer = server.post("/admin/trim", None)
    assert (answer.status_code, answer.json()) == (200, {"released_bytes": 0})  # the CPU has no pool


def test_admin_routes_are_for_this_machine_or_for_the_key(pico: Engine) -> None:
    async def status(options: ServeOptions, client: str, headers: dict[str, str]) -> int:
        transport = httpx.ASGITransport(create_app(pico, options), client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.post("/admin/trim", headers=headers)).status_code

    anywhere = ServeOptions(host="0.0.0.0")
    for client, expected in (("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 403)):
        assert asyncio.run(status(anywhere, client, {})) == expected
    with_key = ServeOptions(host="0.0.0.0", api_key="k")
    assert asyncio.run(status(with_key, "10.0.0.7", {"x-api-key": "k"})) == 200
    assert asyncio.run(status(with_key, "127.0.0.1", {})) == 401
