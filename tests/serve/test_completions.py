"""Text completions: prompts in every form, and what may not happen to a text on its way."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from pyggml_dflash import Engine
from tests.engine.scripted import START, scripted
from tests.engine.test_engine import SPLIT_CHARACTERS
from tests.engine.tiny import opened
from tests.serve.live import Live, events, live


def complete(server: Live, prompt: Any, **fields: Any) -> Any:
    answer = server.post("/v1/completions", {"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Live, prompt: Any, **fields: Any) -> list[Any]:
    """Chunks of a stream, without the word at its end."""
    answer = server.post("/v1/completions", {"prompt": prompt, "stream": True, **fields})
    found = events(answer.text)
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def deltas(chunks: list[Any]) -> list[str]:
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


def test_the_official_client_continues_a_text(server: Live, pico: Engine) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        answer = client.completions.create(model="pico", prompt="Once upon a time", max_tokens=10)
        chunks = client.completions.create(
            model="pico", prompt="Once upon a time", max_tokens=10, stream=True
        )
        text = "".join(chunk.choices[0].text for chunk in chunks)
    assert answer.choices[0].text == text == pico.generate("Once upon a time", max_tokens=10).text


def test_prompts_come_as_texts_or_tokens_alone_or_in_lists(server: Live, pico: Engine) -> None:
    texts = ["Once upon a time", "A small fox"]
    tokens = [pico.tokenize(text) for text in texts]
    expected = [pico.generate(text, max_tokens=6).text for text in texts]
    for prompt, n in ((texts[0], 1), (tokens[0], 1), (texts, 2), (tokens, 2)):
        answer = complete(server, prompt, max_tokens=6)
        assert [choice["text"] for choice in answer["choices"]] == expected[:n]
        assert [choice["index"] for choice in answer["choices"]] == list(range(n))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens[:n]))
        assert answer["usage"]["completion_tokens"] == 6 * n


def test_of_several_answers_those_of_a_prompt_stand_together(server: Live) -> None:
    fields = {"max_tokens": 4, "temperature": 1.0, "seed": 3}
    answer = complete(server, ["Once upon a time", "A small fox"], n=2, **fields)
    alone = [
        complete(server, p, **{**fields, "seed": s})
        for p in ("Once upon a time", "A small fox")
        for s in (3, 4)
    ]
    assert [c["text"] for c in answer["choices"]] == [a["choices"][0]["text"] for a in alone]


def test_logprobs_lie_on_the_text(server: Live) -> None:
    choice = complete(server, "Once upon a time", max_tokens=6, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [0, *accumulate(map(len, logprobs["tokens"]))][:-1]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 2
        assert top[token] == value
    chunks = streamed(server, "Once upon a time", max_tokens=6, logprobs=2)
    offsets = [
        o
        for c in chunks
        for choice in c["choices"]
        if choice["logprobs"]
        for o in choice["logprobs"]["text_offset"]
    ]
    assert offsets == logprobs["text_offset"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": {"a": 1}}, "prompt is {'a': 1}"),
        ({"prompt": []}, "at least 1 item"),
        ({"prompt": [[]]}, "at least 1 item"),
        ({"prompt": [4096]}, "token 0 is 4096; token ids are whole numbers from 0 to 4095"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 17}, "17 answers are asked for"),
        ({"prompt": ["a"] * 9, "n": 2}, "18 answers are asked for"),
        ({"prompt": ""}, "at least one token"),
        ({"prompt": "a", "suffix": "b"}, "suffix is 'b'; this is not supported here"),
        ({"prompt": "a", "echo": True}, "echo is True"),
        ({"prompt": "a", "best_of": 2}, "best_of is 2"),
    ],
)
def test_what_cannot_be_continued_is_refused(server: Live, fields: dict[str, Any], says: str) -> None:
    answer = server.post("/v1/completions", fields)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


# characters (B37) and stop strings (B39)


@pytest.mark.parametrize("pieces", SPLIT_CHARACTERS, ids=lambda pieces: b"|".join(pieces).hex())
def test_no_delta_has_a_part_of_a_character(pieces: list[bytes], tmp_path: Path) -> None:
    whole = b"".join(pieces).decode()
    with opened(scripted(tmp_path / "m.gguf", [*pieces, b"END"])) as engine, live(engine) as server:
        for fields in ({}, {"stop": ["END"]}):
            text = complete(server, [START], **fields)["choices"][0]["text"]
            chunks = streamed(server, [START], **fields)
            assert text == "".join(deltas(chunks)) == whole + ("" if fields else "END")
            assert all("\ufffd" not in delta for delta in deltas(chunks))
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


STOPS = [
    ([b"one", b" t", b"wo", b" three"], ["two"], "one "),
    ([b"one", b" t", b"w", b"o", b" three"], ["two"], "one "),
    ([b"aa", b"ab", b"c"], ["aab"], "a"),
    ([b"x", b"ab", b"cd", b"e"], ["cde", "bc"], "xa"),
    ([b"x", b"ab", b"cd", b"e"], ["e", "abcd"], "x"),
    ([b"one", b" t", b"w"], ["two"], "one tw"),
    ([b"a", b"\n", b"\nb"], ["\n\n"], "a"),
]


@pytest.mark.parametrize(("pieces", "stop", "text"), STOPS)
def test_no_character_of_a_stop_string_is_sent(
    pieces: list[bytes], stop: list[str], text: str, tmp_path: Path
) -> None:
    with opened(scripted(tmp_path / "m.gguf", pieces)) as engine, live(engine) as server:
        choice = complete(server, [START], stop=stop)["choices"][0]
        chunks = streamed(server, [START], stop=stop)
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert "".join(deltas(chunks)) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_line_ends_of_other_scripts_do_not_end_an_event(tmp_path: Path) -> None:
    whole = "a\u2028b\u2029c\x85d"
    with opened(scripted(tmp_path / "m.gguf", [whole.encode()])) as engine, live(engine) as server:
        answer = server.post("/v1/completions", {"prompt": [START], "stream": True})
        assert len(answer.text.splitlines()) == answer.text.count("\n")
        assert "".join(deltas([json.loads(event) for event in events(answer.text)[:-1]])) == whole
