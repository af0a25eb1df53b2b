"""`Engine.submit`: an answer's stream for asyncio, with its result; and small questions beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pyggml_dflash import ContextOverflowError, Engine, Progress, SamplingOptions, UsageError
from tests.engine.tiny import LLAMA, opened, prompt


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with opened(LLAMA, max_ctx=256, chunk=16) as engine:
        yield engine


def test_the_pieces_and_the_result_are_those_of_generate(engine: Engine) -> None:
    seen: list[Progress] = []

    async def ask() -> None:
        stream = await engine.submit(prompt(40), max_tokens=12, ignore_eos=True, progress=seen.append)
        text = "".join([piece.text async for piece in stream])
        expected = engine.generate(prompt(40), max_tokens=12, ignore_eos=True)
        assert text == stream.result.text == expected.text
        assert stream.result.tokens == expected.tokens
        assert stream.result.usage == replace(
            expected.usage, cached_tokens=0
        )  # the second continues the first

    asyncio.run(ask())
    assert [progress.done for progress in seen] == [0, 16, 32, 40]


def test_a_stream_that_is_cancelled_ends_with_what_was_made(engine: Engine) -> None:
    async def ask() -> None:
        stream = await engine.submit(prompt(8), ignore_eos=True)
        text = ""
        async for piece in stream:
            text += piece.text
            stream.cancel()
        assert stream.result.finish_reason == "cancelled"
        assert text == stream.result.text

    asyncio.run(ask())


def test_what_cannot_be_answered_is_refused_before_it_is_queued(engine: Engine) -> None:
    async def ask() -> None:
        with pytest.raises(ContextOverflowError):
            await engine.submit(prompt(40), max_tokens=300)
        with pytest.raises(UsageError, match="logit_bias token 640 is not in the vocabulary"):
            await engine.submit(prompt(4), sampling=SamplingOptions(logit_bias={640: 1.0}))

    asyncio.run(ask())
    with pytest.raises(UsageError, match="logit_bias token 640 is not in the vocabulary"):
        engine.stream(prompt(4), sampling=SamplingOptions(logit_bias={640: 1.0}))


def test_bytes_of_tokens_put_together_are_the_text(engine: Engine) -> None:
    text = "Zażółć gęślą jaźń"
    tokens = engine.tokenize(text, add_special=False)
    assert b"".join(map(engine.token_bytes, tokens)).decode() == text
    with pytest.raises(UsageError, match="token 0 is 640"):
        engine.token_bytes(640)


def test_a_trim_gives_nothing_back_where_there_is_no_legacy_pool(engine: Engine) -> None:
    assert engine.trim() == 0
