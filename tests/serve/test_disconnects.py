"""A client that goes frees what it used (B42), and one that reads slowly holds up nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyggml_dflash import Engine
from tests.engine.hostile import edited
from tests.engine.tiny import LLAMA, opened
from tests.serve.live import CHAT, STORY, Live, asked, busy, live, until

ENDLESS = {"messages": STORY, "ignore_eos": True, "stream": True}
N_PROMPT = 60_000


def state(server: Live) -> str:
    return str(server.slots()["slots"][0]["state"])


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_whose_client_goes_ends_in_decode(lasting: Engine, stream: bool) -> None:
    with live(lasting) as server:
        with asked(server, CHAT, {**ENDLESS, "stream": stream}):
            until(lambda: state(server) == "decode")
        until(lambda: state(server) == "free")
        assert server.metric("dflash_answers_total", reason="cancelled") == 1
        follow = server.post(CHAT, {"messages": STORY, "max_tokens": 2})
        assert follow.json()["choices"][0]["message"]["content"] == lasting.chat(STORY, max_tokens=2).text


def test_no_client_goes_unnoticed_whenever_it_goes(lasting: Engine) -> None:
    n = 25
    with live(lasting) as server:
        for i in range(n):
            with asked(server, CHAT, ENDLESS) as connection:
                said = b""
                while said.count(b"data: ") < 2 + i % 7:  # it may go together with an event
                    said += connection.recv(4096)
            until(lambda: state(server) == "free")
        assert server.metric("dflash_answers_total", reason="cancelled") == n


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model that takes many seconds to read its longest prompts, in small chunks."""
    path: Path = tmp_path_factory.mktemp("slow") / "long.gguf"
    edited(LLAMA, path, keys={"llama.context_length": 65536})
    with opened(path, max_ctx=65536, chunk=128) as engine:
        yield engine


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_whose_client_goes_ends_in_prefill(slow: Engine, stream: bool) -> None:
    prompt = [7 + i % 50 for i in range(N_PROMPT)]
    with live(slow) as server:
        with asked(server, "/v1/completions", {"prompt": prompt, "stream": stream}):
            until(lambda: server.slots()["slots"][0]["n_prefilled"] > 0)
        until(lambda: state(server) == "free")
        assert server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2}).status_code == 200
        assert server.metric("dflash_prompt_tokens_total") == 2


def test_an_answer_whose_client_goes_leaves_the_queue(lasting: Engine) -> None:
    with live(lasting) as server, busy(server):
        with asked(server, CHAT, ENDLESS):
            until(lambda: len(server.slots()["queue"]) == 1)
        until(lambda: server.slots()["queue"] == [])
        assert state(server) == "decode"


def test_who_does_not_read_holds_up_nobody(pico: Engine) -> None:
    body = {**ENDLESS, "n": 2, "logprobs": True, "top_logprobs": 20}
    with live(pico) as server, asked(server, CHAT, body):
        until(lambda: server.metric("dflash_answers_total", reason="length") == 2)
        assert server.post(CHAT, {"messages": STORY, "max_tokens": 1}).status_code == 200


def test_silence_is_broken_by_comments(lasting: Engine) -> None:
    with live(lasting, keep_alive_s=0.05) as server, busy(server), asked(server, CHAT, ENDLESS) as waiting:
        said = b""
        while said.count(b": queued 1\n\n") < 4:
            said += waiting.recv(65536)
