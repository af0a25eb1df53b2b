"""Stored states on a GPU, in whose memory the slots lie: many turns in a row drift no further than one."""

from __future__ import annotations

from typing import Any, Final

import pytest

from pyggml_dflash import Engine, GenerationResult

pytestmark = pytest.mark.gpu

N_TURNS: Final = 12
APART: Final = 1e-3  # of log-probabilities, at most: kernels of a GPU need not sum in one order


def logprobs(result: GenerationResult) -> list[float]:
    assert result.logprobs is not None
    return [token.logprob for token in result.logprobs]


@pytest.mark.parametrize("snapshot_memory", ["pageable", "pinned"])
def test_twelve_cached_turns_answer_as_twelve_cold_ones(gpu: str, snapshot_memory: Any) -> None:
    """The same tokens, and log-probabilities that do not drift with the turns (B16)."""
    options: dict[str, Any] = {"max_ctx": 2048, "spec": "off", "snapshot_memory": snapshot_memory}
    with Engine.open(device=gpu, slots=2, **options) as engine:
        messages = list[dict[str, str]]()
        for i in range(N_TURNS):
            messages.append({"role": "user", "content": f"Tell me about the fox and hen number {i}."})
            asked: dict[str, Any] = {"max_tokens": 12, "logprobs": 1, "ignore_eos": True}
            cold = engine.chat(messages, cache_prompt=False, **asked)
            cached = engine.chat(messages, **asked)
            assert (cached.usage.cached_tokens > 0) == (i > 0)
            assert cached.tokens == cold.tokens, f"turn {i}"
            pairs = zip(logprobs(cached), logprobs(cold), strict=True)
            assert max(abs(a - b) for a, b in pairs) <= APART, f"turn {i}"
            messages.append({"role": "assistant", "content": cold.text})
        assert engine.stats().snapshots is not None
        assert engine.stats().snapshots.restored == N_TURNS - 1
