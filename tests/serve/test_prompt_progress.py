"""`return_progress`: streams tell how far a prompt is read, in the words of llama.cpp's server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from openai import OpenAI

from pyggml_dflash import Engine
from pyggml_dflash.requests import Progress
from pyggml_dflash.serve.prompt_progress import PromptProgress, Reporter
from tests.engine.tiny import opened
from tests.serve.live import CHAT, STORY, Live, comments, events, live

COMPLETIONS: Final = "/v1/completions"
TEXT: Final = "The fox and the hen went to the river. " * 3
BODIES: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3},
    COMPLETIONS: {"prompt": TEXT, "max_tokens": 3},
}
both = pytest.mark.parametrize("path", list(BODIES))


@pytest.fixture(scope="module")
def storing() -> Iterator[Live]:
    """A server that reads prompts in many forwards, and stores states."""
    with (
        opened(None, max_ctx=512, chunk=16, slots=2) as engine,
        live(engine) as server,
    ):
        yield server


def chunks_of(server: Live, path: str, **fields: Any) -> tuple[list[Any], str]:
    """The chunks of a stream, and all that was sent."""
    answer = server.post(path, {**BODIES[path], "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    found = events(answer.text)
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]], answer.text


def reports(chunks: list[Any]) -> list[Any]:
    return [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]


def text_of(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@both
def test_chunks_tell_how_far_the_prompt_is_read(storing: Live, path: str) -> None:
    chunks, sent = chunks_of(storing, path, return_progress=True, cache_prompt=False)
    found, total = reports(chunks), chunks[-1]["timings"]["effective_prompt_tokens"]
    assert all(report.keys() == {"total", "cache", "processed", "time_ms"} for report in found)
    assert {(report["total"], report["cache"]) for report in found} == {(total, 0)}
    assert found[0]["processed"] == found[0]["time_ms"] == 0
    assert found[-1]["processed"] == total
    for name in ("processed", "time_ms"):
        values = [report[name] for report in found]
        assert values == sorted(values)
        assert all(type(value) is int for value in values)
    said = [comment for comment in comments(sent) if comment.startswith("prefill ")]
    assert said == [f"prefill {report['processed']}/{total}" for report in found]


@both
def test_reports_add_nothing_to_the_answer(storing: Live, path: str) -> None:
    plain, _ = chunks_of(storing, path)
    told, _ = chunks_of(storing, path, return_progress=True, stream_options={"include_usage": True})
    assert reports(plain) == []
    assert text_of(told) == text_of(plain) != ""
    silent = [chunk for chunk in told if "prompt_progress" in chunk]
    assert text_of(silent) == ""
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in silent)
    assert told.index(silent[-1]) < next(i for i, chunk in enumerate(told) if text_of([chunk]))


@both
def test_what_a_stored_state_has_counts_as_cache(storing: Live, path: str) -> None:
    storing.engine.snapshots.clear()
    for is_first in (True, False):
        chunks, _ = chunks_of(storing, path, return_progress=True)
        found, timings = reports(chunks), chunks[-1]["timings"]
        assert (timings["cached_prefix_tokens"] == 0) is is_first
        assert {report["cache"] for report in found} == {timings["cached_prefix_tokens"]}
        assert found[0]["processed"] == timings["cached_prefix_tokens"] < found[-1]["processed"]


@both
def test_each_of_several_answers_has_reports_of_its_own(storing: Live, path: str) -> None:
    chunks, _ = chunks_of(storing, path, return_progress=True, n=2)
    for index in range(2):
        own = [chunk for chunk in chunks if [c["index"] for c in chunk["choices"]] == [index]]
        found = reports(own)
        assert found[0]["processed"] == found[0]["cache"]
        assert found[-1]["processed"] == found[-1]["total"]


@both
def test_without_a_stream_it_changes_nothing(storing: Live, path: str) -> None:
    body = {**BODIES[path], "cache_prompt": False}
    plain, asked = (storing.post(path, {**body, "return_progress": on}).json() for on in (False, True))
    assert asked.keys() == plain.keys()
    assert (asked["choices"], asked["usage"]) == (plain["choices"], plain["usage"])
    refused = storing.post(path, {**body, "return_progress": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_progress"


def test_the_official_client_reads_them_as_llama_cpps(server: Live, pico: Engine) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        stream = client.chat.completions.create(
            model="pico",
            messages=STORY,  # type: ignore[arg-type]
            max_tokens=8,
            stream=True,
            extra_body={"return_progress": True},
        )
        chunks: list[Any] = list(stream)
    found = [chunk.prompt_progress for chunk in chunks if hasattr(chunk, "prompt_progress")]
    assert found[-1]["processed"] == found[-1]["total"]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == pico.chat(STORY, max_tokens=8).text


def test_the_document_says_that_streams_tell_it(server: Live) -> None:
    document = server.get("/openapi.json").json()
    for path in BODIES:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "prompt_progress" in schema["properties"]["return_progress"]["description"]


def test_between_the_first_report_and_the_last_there_is_one_in_a_tenth_of_a_second() -> None:
    clock = iter([0.0, 0.05, 0.099, 0.125, 0.15, 0.25, 0.26])
    done = iter([4, 8, 12, 16, 20, 24, 30])
    told: list[PromptProgress] = []

    async def report() -> None:
        reporter = Reporter(asyncio.get_running_loop(), told.append, clock=lambda: next(clock))
        for n in done:
            reporter(Progress(phase="prefill", done=n, total=30))
        await asyncio.sleep(0)

    asyncio.run(report())
    assert [(t.processed, t.time_ms) for t in told] == [(4, 0), (16, 125), (24, 250), (30, 260)]
    assert {(t.cache, t.total) for t in told} == {(4, 30)}
