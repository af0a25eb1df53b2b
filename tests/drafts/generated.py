"""Whole requests on a loaded model, with and without drafts, on the test's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.options import EngineOptions, SamplingOptions
from pyggml_dflash.requests import GenerationRequest, GenerationResult
from tests.drafts.speculated import Tell, Told
from tests.engine.served import Reader, answered
from tests.reference.opened import on_the_cpu

EXACT = 1e-3  # of log probabilities, in single precision; 1e-4 was measured


@contextmanager
def loaded_model(model: Path, *, max_ctx: int = 512, **options: Any) -> Iterator[Loaded]:
    """A model on the CPU, caches in single precision, with the drafts that options ask for."""
    plain: EngineOptions = on_the_cpu(model, max_ctx=max_ctx, flash_attn="off")
    loaded = load(replace(plain, **options), lambda _: None)
    try:
        yield loaded
    finally:
        loaded.core.close()


def run(loaded: Loaded, prompt: list[int], reader: Reader | None = None, **request: Any) -> GenerationResult:
    """Answer one request; its pieces, put together, are its text and tokens."""
    sampling = SamplingOptions(**request.pop("sampling", {}))
    reader = Reader() if reader is None else reader
    asked = GenerationRequest(tokens=tuple(prompt), sampling=sampling, **request)
    result = answered(loaded, asked, reader)
    assert "".join(piece.text for piece in reader.pieces) == result.text
    assert tuple(t for piece in reader.pieces for t in piece.tokens) == result.tokens
    return result


@contextmanager
def telling(loaded: Loaded, tell: Tell) -> Iterator[None]:
    """While this lasts the engine's drafter proposes what `tell` says."""
    own = loaded.core._drafters
    assert own
    loaded.core._drafters = tuple(Told(drafter, tell) for drafter in own)  # type: ignore[misc]
    try:
        yield
    finally:
        loaded.core._drafters = own


def assert_same(found: GenerationResult, plain: GenerationResult) -> None:
    """Everything that a caller sees of the answer, but for how long it took."""
    for name in ("tokens", "text", "finish_reason", "stop", "usage", "seed"):
        assert getattr(found, name) == getattr(plain, name), name
    assert [p.token for p in found.logprobs] == [p.token for p in plain.logprobs]
    for a, b in zip(found.logprobs, plain.logprobs, strict=True):
        assert abs(a.logprob - b.logprob) < EXACT
        assert [token for token, _ in a.top] == [token for token, _ in b.top]
        np.testing.assert_allclose([x for _, x in a.top], [x for _, x in b.top], rtol=0, atol=EXACT)
