"""Slots, stored states and parking over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from anthropic import Anthropic

from pyggml_dflash import Engine
from tests.engine.tiny import opened
from tests.serve.live import CHAT, PATIENCE_S, STORY, Live, asked, comments, live, until

ENDLESS: Final = {"messages": STORY, "ignore_eos": True}
LONG: Final = [{"role": "user", "content": "The fox and the hen. " * 40}]


@pytest.fixture(scope="module")
def four() -> Iterator[Engine]:
    """The shipped model with four slots."""
    with opened(None, max_ctx=2048, slots=4) as engine:
        yield engine


def states(server: Live) -> list[str]:
    return [slot["state"] for slot in server.slots()["slots"]]


# several slots (B28)


def test_slots_show_what_they_do_and_the_others_wait_in_order(four: Engine) -> None:
    short = {"messages": STORY, "max_tokens": 2, "stream": True}
    with live(four) as server, ThreadPoolExecutor(3) as pool:
        with asked(server, CHAT, {**ENDLESS, "n": 3}), asked(server, CHAT, ENDLESS):
            until(lambda: states(server) == ["decode"] * 4)
            waiting = []
            for i in range(1, 4):
                waiting.append(pool.submit(server.post, CHAT, short))
                until(lambda i=i: len(server.slots()["queue"]) == i)
            report = server.slots()
            assert [slot["id"] for slot in report["slots"]] == [0, 1, 2, 3]
            assert len({slot["request_id"] for slot in report["slots"]}) == 2
            assert all(slot["n_past"] >= slot["n_prompt"] > 0 for slot in report["slots"])
            assert [entry["position"] for entry in report["queue"]] == [1, 2, 3]
        answers = [future.result(PATIENCE_S) for future in waiting]
        assert [comments(answer.text)[0] for answer in answers] == [f"queued {i}" for i in (1, 2, 3)]
        ids = [answer.headers["x-request-id"] for answer in answers]
        assert [entry["request_id"] for entry in report["queue"]] == ids
        until(lambda: states(server) == ["free"] * 4)
        assert server.metric("dflash_slots") == 4


def test_several_answers_to_one_request_are_those_of_requests_alone(four: Engine) -> None:
    body = {"messages": STORY, "max_tokens": 16, "temperature": 0.9, "seed": 3}
    with live(four) as server:
        together = server.post(CHAT, {**body, "n": 4}).json()["choices"]
        alone = [server.post(CHAT, {**body, "seed": 3 + i}).json()["choices"][0] for i in range(4)]
    texts = [choice["message"]["content"] for choice in together]
    assert texts == [choice["message"]["content"] for choice in alone]
    assert len(set(texts)) > 1


# stored states


def test_a_prompt_that_was_read_is_not_read_again(four: Engine) -> None:
    four.snapshots.clear()
    with live(four) as server:
        body = {"messages": LONG, "max_tokens": 4}
        first, again = (server.post(CHAT, body).json() for _ in range(2))
        n_prompt = first["usage"]["prompt_tokens"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert n_prompt / 2 < cached < n_prompt
        assert again["timings"]["cached_prefix_tokens"] == cached
        assert again["timings"]["prefilled_tokens"] == n_prompt - cached
        assert again["choices"] == first["choices"]
        fresh = server.post(CHAT, {**body, "cache_prompt": False}).json()
        assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert fresh["choices"] == first["choices"]
        props = server.get("/props").json()["prefix_cache"]
        assert (props["lifetime_hits"], props["cached_tokens"]) == (1, cached)
        assert props["stored"]["n_states"] > 0
        assert server.metric("dflash_cached_tokens_total") == cached
        assert server.metric("dflash_prefix_hits_total", place="memory") >= 1
        assert server.metric("dflash_snapshot_bytes") == props["stored"]["n_bytes"] > 0
        streamed = server.post(CHAT, {**body, "stream": True})
        assert f"prefill {cached}/{n_prompt}" in comments(streamed.text)


def test_an_earlier_answer_that_is_not_read_again_is_told_of(four: Engine) -> None:
    four.snapshots.clear()
    user = {"role": "user", "content": "The fox and the hen. " * 4}
    with live(four) as server:

        def ask(*messages: Any) -> Any:
            timings = server.post(CHAT, {"messages": messages, "max_tokens": 8}).json()["timings"]
            n_read = timings["cached_prefix_tokens"] + timings["prefilled_tokens"]
            assert timings["effective_prompt_tokens"] == n_read
            return timings

        answer = {"role": "assistant", "content": "The fox ran home, and the hen slept. " * 4}
        first, again = (ask(user) for _ in range(2))
        assert first["cached_prefix_tokens"] == 0
        assert again["cached_prefix_tokens"] > 0
        two, more, longer = (
            ask(user, answer, user),
            ask(user, answer, user),
            ask(user, answer, user, answer, user),
        )
        found = [t["agent_turn_cache_hit"] for t in (first, again, two, more, longer)]
        assert found == [False, False, False, True, True]
        assert not ask({"role": "system", "content": "Be brief."}, user, answer, user)["agent_turn_cache_hit"]


def test_what_was_read_for_a_client_that_went_is_not_read_again(four: Engine) -> None:
    four.snapshots.clear()
    with live(four) as server:
        with asked(server, CHAT, {"messages": LONG, "ignore_eos": True, "stream": True}):
            until(lambda: "decode" in states(server))
        until(lambda: states(server) == ["free"] * 4)
        usage = server.post(CHAT, {"messages": LONG, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2


def test_every_protocol_tells_what_was_stored(four: Engine) -> None:
    four.snapshots.clear()
    with live(four) as server, Anthropic(base_url=server.url, api_key="unused") as claude:
        ask: Any = {"model": "pico", "messages": LONG, "max_tokens": 1}
        first, again = (claude.messages.create(**ask).usage for _ in range(2))
        assert first.cache_read_input_tokens == 0
        assert again.cache_read_input_tokens is not None
        assert again.cache_read_input_tokens > 0
        assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens
        with claude.messages.stream(**ask) as stream:
            assert stream.get_final_message().usage == again
        plain = {"input": LONG[0]["content"], "max_output_tokens": 1}
        usage = server.post("/v1/responses", plain).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == again.cache_read_input_tokens
        usage = server.post("/v1/responses", {**plain, "cache_prompt": False}).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == 0
        text = {"prompt": "Once upon a time " * 400, "max_tokens": 1}
        usages = [server.post("/v1/completions", text).json()["usage"] for _ in range(2)]
        assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0


# parking


def held(server: Live) -> int:
    memory = server.get("/props").json()["memory"]
    return sum(n for kinds in memory.values() for n in kinds.values())


def test_a_parked_model_is_not_there_until_it_is_unparked() -> None:
    body = {"messages": STORY, "max_tokens": 8}
    with opened(None, max_ctx=512, slots=2) as engine, live(engine) as server:
        before, bytes_before = server.post(CHAT, body).json()["choices"], held(server)
        for _ in range(2):  # the second one changes nothing
            answer = server.post("/admin/park", {})
            assert (answer.status_code, answer.json()) == (200, {"parked": True})
        assert held(server) < bytes_before / 2
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "parked")
        for path, request in ((CHAT, body), ("/v1/messages", body), ("/v1/responses", {"input": "x"})):
            refused = server.post(path, {**request, "stream": False})
            assert refused.status_code == 503
            assert "POST /admin/unpark brings it back" in refused.json()["error"]["message"]
        assert server.get("/props").json()["parked"] is True
        assert server.slots()["queue"] == []
        assert server.post("/admin/unpark", None).json() == {"parked": False}
        assert server.get("/health").status_code == 200
        assert server.post(CHAT, body).json()["choices"] == before
        assert held(server) > bytes_before / 2


@pytest.mark.parametrize("cancel", [False, True])
def test_answers_that_run_end_before_the_model_is_parked(cancel: bool) -> None:
    with opened(None, max_ctx=512) as engine, live(engine) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, CHAT, ENDLESS)
        until(lambda: states(server) == ["decode"])
        assert server.post("/admin/park", {"cancel": cancel} if cancel else None).status_code == 200
        answer = running.result(PATIENCE_S)
        if cancel:
            assert answer.status_code == 503
        else:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert server.post("/admin/park", {"now": True}).status_code == 400
