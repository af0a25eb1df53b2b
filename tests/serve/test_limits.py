"""Who may ask, how much, and how many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from pyggml_dflash import Engine, UsageError
from pyggml_dflash.serve.app import create_app
from pyggml_dflash.serve.settings import ServeOptions
from tests.serve.live import CHAT, PATIENCE_S, STORY, Live, busy, comments, live, until

SHORT = {"messages": STORY, "max_tokens": 2}


def official(server: Live, key: str = "unused") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


# the queue (B28)


def test_requests_beyond_the_slots_wait_in_order_and_show_their_place(lasting: Engine) -> None:
    with live(lasting) as server, ThreadPoolExecutor(3) as pool:
        waiting = []
        with busy(server):
            for i in range(1, 4):
                waiting.append(pool.submit(server.post, CHAT, {**SHORT, "stream": True}))
                until(lambda i=i: len(server.slots()["queue"]) == i)
            queue = server.slots()["queue"]
            assert [entry["position"] for entry in queue] == [1, 2, 3]
            assert server.metric("dflash_queue_depth") == 3
            assert server.metric("dflash_slots_busy") == 1
        answers = [future.result(PATIENCE_S) for future in waiting]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [comments(answer.text)[0] for answer in answers] == [f"queued {i}" for i in (1, 2, 3)]
        assert [entry["request_id"] for entry in queue] == [a.headers["x-request-id"] for a in answers]
        assert server.slots()["queue"] == []


@pytest.mark.parametrize("limit", [0, 2])
def test_one_more_than_may_wait_is_told_to_come_back(lasting: Engine, limit: int) -> None:
    with live(lasting, queue_limit=limit) as server, ThreadPoolExecutor(4) as pool:
        with busy(server):
            waiting = [pool.submit(server.post, CHAT, SHORT) for _ in range(limit)]
            until(lambda: len(server.slots()["queue"]) == limit)
            refused = server.post(CHAT, SHORT)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError), official(server) as client:
                client.chat.completions.create(model="pico", **SHORT)  # type: ignore[call-overload]
        assert [future.result(PATIENCE_S).status_code for future in waiting] == [200] * limit
        assert server.post(CHAT, SHORT).status_code == 200


def test_a_request_for_more_answers_than_may_wait_is_served_when_nothing_runs(pico: Engine) -> None:
    with live(pico, queue_limit=0) as server:
        answer = server.post(CHAT, {**SHORT, "n": 3})
        assert len(answer.json()["choices"]) == 3


# sizes


def test_a_body_beyond_the_limit_is_refused(pico: Engine) -> None:
    with live(pico, max_body_bytes=2048) as server:
        big = {"messages": [{"role": "user", "content": "x" * 4096}]}
        refused = server.post(CHAT, big)
        assert refused.status_code == 413
        assert refused.json()["error"]["message"] == "the body is larger than 2.0 KiB"
        assert refused.json()["error"]["code"] == "body_too_large"

        def piecewise() -> Iterator[bytes]:
            for _ in range(64):
                yield b" " * 64

        with server.client() as client:
            headers = {"content-type": "application/json"}
            in_pieces = client.post(CHAT, content=piecewise(), headers=headers)
        assert (in_pieces.status_code, in_pieces.json()) == (413, refused.json())
        assert server.post(CHAT, SHORT).status_code == 200


def test_a_conversation_of_too_many_messages_is_refused(pico: Engine) -> None:
    with live(pico, max_messages=2) as server:
        refused = server.post(CHAT, {"messages": STORY * 3})
        assert refused.status_code == 400
        assert "messages has 3 items; at most 2 are taken" in refused.json()["error"]["message"]
        assert server.post(CHAT, {**SHORT, "messages": STORY * 2}).status_code == 200


# keys


def test_without_the_key_nothing_but_health_is_told(pico: Engine) -> None:
    with live(pico, api_key="s3cret") as server:
        assert server.get("/health").status_code == 200
        for path in ("/v1/models", "/props", "/slots", "/metrics", "/openapi.json", "/nowhere"):
            assert server.get(path).status_code == 401, path
            assert server.get(path, headers={"authorization": "Bearer s3cre"}).status_code == 401, path
        for headers in ({"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
            assert server.get("/v1/models", headers=headers).status_code == 200
        with official(server, "wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"
            assert "s3cret" not in str(caught.value.body)
        with official(server, "s3cret") as client:
            assert [model.id for model in client.models.list()] == ["pico"]


# pages of other origins


def test_pages_of_other_origins_may_change_nothing_unless_allowed(pico: Engine) -> None:
    with live(pico) as server:
        own = {"origin": server.url}
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[", "x" * 1000):
            refused = server.post(CHAT, SHORT, headers={"origin": origin})
            assert refused.status_code == 403, origin
            assert "access-control-allow-origin" not in refused.headers
        assert server.post(CHAT, SHORT, headers=own).status_code == 200
        with server.client() as client:
            asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
            assert "access-control-allow-origin" not in client.options(CHAT, headers=asked).headers


def test_allowed_origins_are_told_so(pico: Engine) -> None:
    with live(pico, cors_origins=("https://good.example",), api_key="k") as server:
        good = {"origin": "https://good.example", "access-control-request-method": "POST"}
        with server.client() as client:
            answer = client.options(CHAT, headers=good)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://good.example"
        headers = {"origin": "https://good.example", "x-api-key": "k"}
        answer = server.post(CHAT, SHORT, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        headers["origin"] = "https://evil.example"
        assert server.post(CHAT, SHORT, headers=headers).status_code == 403


def test_a_name_that_a_page_pointed_at_this_machine_is_refused(pico: Engine) -> None:
    with live(pico) as server:
        for name in ("evil.example", "evil.example:80", "[", "127.0.0.1.evil.example"):
            assert server.get("/props", headers={"host": name}).status_code == 403, name
        for name in ("localhost", "127.0.0.1:99", "[::1]:8080", "LOCALHOST"):
            assert server.get("/health", headers={"host": name}).status_code == 200, name
    with live(pico, allowed_hosts=("models.example",)) as server:
        assert server.get("/health", headers={"host": "models.example"}).status_code == 200
        assert server.get("/health", headers={"host": "localhost"}).status_code == 403
    with live(pico, api_key="k") as server:
        assert server.get("/health", headers={"host": "any.example"}).status_code == 200


# options


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"host": ""}, "host is ''"),
        ({"port": 65536}, "port is 65536"),
        ({"port": "80"}, "port is '80'"),
        ({"queue_limit": -1}, "queue_limit is -1"),
        ({"api_key": ""}, "api_key is '\\*\\*\\*'"),
        ({"api_key": "two words"}, "api_key is '\\*\\*\\*'"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"cors_origins": ["*"]}, "cors_origins is"),
        ({"cors_origins": ("chat.example",)}, "cors_origins is 'chat.example'; it must be scheme and host"),
        ({"cors_origins": ("*", "https://chat.example/")}, "cors_origins is 'https://chat.example/'"),
        ({"default_max_tokens": 0}, "max_tokens is 0"),
        ({"keep_alive_s": 0}, "keep_alive_s is 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ServeOptions(**fields)


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(ServeOptions(api_key="s3cret"))


def test_an_unforeseen_failure_is_a_500_without_details(pico: Engine) -> None:
    app = create_app(pico)

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a secret")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/broken")

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert "secret" not in answer.text
