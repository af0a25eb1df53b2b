"""A request that continues a stored state gets the cold answer bit by bit, whatever the engine: every family,
type of cache, cut and slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import Engine, GenerationResult
from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.engine import reuse
from pyggml_dflash.options import KV_TYPES, KVType
from pyggml_dflash.state import cuts
from pyggml_dflash.state.cuts import CapturePoint, PromptEnds
from tests.engine.tiny import opened
from tests.tiny import Tiny, tokens, write_tiny

CHUNK = 64
START, END, LINE = 258, 259, 10
COLD: dict[str, Any] = {"prefix_cache_max_mib": 0}


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("engines"), Tiny(architecture=request.param))


def turn(role: int, n: int, seed: int) -> list[int]:
    return [START, role, LINE, *tokens(n, seed=seed), END, LINE]


def conversation(n_turns: int, *, system: int = 0) -> list[list[int]]:
    """The prompts of a conversation that only grows."""
    history = turn(1, system, 50) if system else []
    prompts = []
    for i in range(n_turns):
        history = history + turn(2, 21 + 5 * i, 60 + i)
        prompts.append([*history, START, 3, LINE])
        history = history + turn(3, 19 + 3 * i, 80 + i)
    return prompts


def ask(engine: Engine, prompt: list[int], **options: Any) -> GenerationResult:
    return engine.generate(prompt, max_tokens=6, ignore_eos=True, logprobs=3, **options)


def assert_same(found: GenerationResult, cold: GenerationResult) -> None:
    assert (found.tokens, found.logprobs) == (cold.tokens, cold.logprobs)


@contextmanager
def busy(engine: Engine, n: int) -> Iterator[None]:
    """Have the first `n` slots decode."""
    streams = [engine.stream([7, 8, 9 + i], ignore_eos=True, cache_prompt=False) for i in range(n)]
    try:
        for stream in streams:
            next(stream)
        assert [slot.phase for slot in engine.stats().slots[:n]] == ["decode"] * n
        yield
        assert [slot.phase for slot in engine.stats().slots[:n]] == ["decode"] * n
    finally:
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("cache", KV_TYPES)
def test_a_conversation_gets_the_cold_answers_in_every_slot(model: Path, cache: KVType) -> None:
    prompts = conversation(4, system=40)
    common: dict[str, Any] = {"max_ctx": 1024, "chunk": CHUNK, "slots": 2}
    common |= {"cache_type_k": cache, "cache_type_v": cache}
    with opened(model, **common, **COLD) as plain:
        expected = [ask(plain, prompt) for prompt in prompts]
        assert plain.stats().snapshots is None
        assert all(result.reuse is None for result in expected)
    with opened(model, **common) as engine:
        for i, (prompt, cold) in enumerate(zip(prompts, expected, strict=True)):
            with busy(engine, i % 2):  # captured in one slot, restored into the other
                found = ask(engine, prompt)
            assert_same(found, cold)
            n_new = len(prompt) - len(prompts[i - 1]) if i else len(prompt)
            assert len(prompt) - found.usage.cached_tokens <= n_new + CHUNK
            assert (found.usage.cached_tokens > 0) == (i > 0)
        stats = engine.stats().snapshots
    assert stats is not None
    assert stats.capture_failures == {}
    assert (stats.hits, stats.restored) == ({"memory": 3}, 3)


def test_a_state_of_every_cut_is_continued_as_if_it_had_just_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends of forwards at turns, chunks and in between; what follows a cut is another text each time."""

    def every_end(n_tokens: int, boundaries: Any, ends: PromptEnds, **_: Any) -> list[CapturePoint]:
        return [CapturePoint(position=end, protect=True) for end in ends.all if end < n_tokens]

    prompt = conversation(4, system=90)[-1]
    with opened(model, max_ctx=1024, chunk=CHUNK) as engine, monkeypatch.context() as patch:
        patch.setattr(reuse, "capture_points", every_end)
        whole = ask(engine, prompt)
        cuts = [stored.n_past for stored in engine.snapshots.list()]
        assert len(cuts) >= 8
        patch.setattr(reuse, "capture_points", lambda *_, **__: [])
        asked = {cut: [*prompt[:cut], *tokens(30, seed=cut)] for cut in cuts}
        found = {cut: ask(engine, text) for cut, text in asked.items()}
        again = ask(engine, prompt)
        assert [found[cut].usage.cached_tokens for cut in cuts] == cuts
        assert again.usage.cached_tokens == max(cuts)
        assert_same(again, whole)
        for cut, text in asked.items():
            assert_same(found[cut], ask(engine, text, cache_prompt=False))


def test_a_prompt_of_one_token_more_and_the_same_prompt_again_are_continued(model: Path) -> None:
    prompt = conversation(3)[-1]
    with opened(model, max_ctx=1024, chunk=CHUNK) as engine:
        first = ask(engine, prompt)
        for text in (prompt, [*prompt, 5], prompt):
            found = ask(engine, text)
            assert 0 < found.usage.cached_tokens < len(text)
            assert_same(found, ask(engine, text, cache_prompt=False))
        assert_same(ask(engine, prompt), first)


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_a_beginning_that_another_prompt_had_too_is_continued(
    model: Path, cache: KVType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B22: at once by models with attention alone, from where a forward ends in it.

    Those with recurrent state store one there when they meet the beginning again.
    """
    monkeypatch.setattr(cuts, "LONG", 256)
    monkeypatch.setattr(cuts, "LAST", 16)
    head = turn(1, 100, 1)  # 105 tokens
    turns = [[*head, *turn(2, n, 60 + n), *turn(3, 30, 7), START, 3, LINE] for n in (40, 90, 5)]
    raw = [
        [*tokens(n_shared, seed=1), *tokens(n, seed=n)] for n_shared, n in ((300, 20), (290, 30), (100, 9))
    ]
    rows_only = model.stem in ("llama", "qwen3")
    # ends of the first: 64, 106, ...; of the raw ones: 64, 128, 192, 256, and their own
    for prompts, n_cached in ((turns, (0, 106, 106)), (raw, (0, 256, 64))):
        with opened(
            model, max_ctx=1024, chunk=CHUNK, slots=2, cache_type_k=cache, cache_type_v=cache
        ) as engine:
            for i, (prompt, n) in enumerate(zip(prompts, n_cached, strict=True)):
                with busy(engine, i % 2):
                    found = ask(engine, prompt)
                assert_same(found, ask(engine, prompt, cache_prompt=False))
                if rows_only:
                    assert found.usage.cached_tokens == n
                    assert found.reuse is not None
                    assert found.reuse.stop == ("differs" if n else "nothing stored")
                assert_same(ask(engine, prompt), found)
            stats = engine.stats().snapshots
            assert stats is not None
            assert (stats.capture_failures, stats.unusable) == ({}, {})


def test_a_long_prompt_sent_again_runs_its_last_tokens_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is continued by one that parts from it there, and by one that goes on from where forwards end."""
    monkeypatch.setattr(cuts, "LONG", 256)
    monkeypatch.setattr(cuts, "LAST", 16)
    prompt = tokens(300, seed=1)  # with ends at 64, 128, 192, 256 and, its own, at 284
    other, longer = [*prompt[:290], *tokens(10, seed=2)], [*prompt, *tokens(80, seed=3)]
    with opened(model, max_ctx=1024, chunk=CHUNK, slots=2) as engine:
        first = ask(engine, prompt)
        for text, n_cached in ((prompt, 284), (other, 284), (longer, 256), (longer, 364), (prompt, 256)):
            found = ask(engine, text)
            assert found.usage.cached_tokens == n_cached
            assert_same(found, ask(engine, text, cache_prompt=False))
        assert_same(ask(engine, prompt), first)
        stats = engine.stats().snapshots
        assert stats is not None
        assert stats.capture_failures == {}


def test_a_prompt_of_sixteen_thousand_tokens_sent_again_costs_less_than_three_percent(tmp_path: Path) -> None:
    """Raw and with turns. In rows less than a half of that, since late ones cost up to twice as much."""
    model = write_tiny(tmp_path, Tiny(architecture="qwen35", n_layer=2, n_ctx_train=32768))
    n, head = 16_384, turn(1, 9000, 1)
    raw, n_turn = tokens(n, seed=4), n - len(head) - 8
    chat = [*head, *turn(2, n_turn, 5), START, 3, LINE]
    with opened(model, max_ctx=n + 64, slots=2) as engine:
        for text in (raw, chat):
            cold, again = ask(engine, text), ask(engine, text)
            assert (len(text), cold.usage.cached_tokens) == (n, 0)
            assert n - again.usage.cached_tokens < 0.014 * n
            assert_same(again, cold)
