"""Alone is together where weights are quantised, with and without stored states and drafts, and beside seven.

Products of quantised weights round activations to a few bits, so a row that a kernel treats otherwise among
others soon chooses another token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.engine.loader import load
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.options import EngineOptions
from tests.engine.arrivals import assert_alone_is_together, every_order, short_and_long
from tests.engine.served import answered
from tests.reference.stored import model_file
from tests.tiny import Tiny, write_tiny

FAMILIES: Final = ("qwen35", "qwen35moe", "qwen4exp")
EIGHT: Final = (9, 40, 170, 33, 12, 80, 25, 60)  # tokens of their prompts
# Arrivals of eight: at once, one by one, and the last ones when the first are over.
AT: Final = ((0,) * 8, (0, 1, 2, 3, 5, 7, 9, 12), (0, 0, 0, 0, 14, 15, 30, 31))
ORDERS: Final = ((0, 1, 2, 3, 4, 5, 6, 7), (2, 7, 0, 5, 1, 3, 6, 4), (7, 6, 5, 4, 3, 2, 1, 0))

# Rows of K-quants are of whole blocks of 256.
WIDE: Final[dict[str, Any]] = {
    "n_layer": 2,
    "n_vocab": 640,
    "head_dim": 64,
    "net_head_dim": 64,
    "index_dim": 64,
    **dict.fromkeys(("n_embd", "n_ff", "expert_ff", "shared_ff", "low_rank", "ngram_dim"), 256),
}


def model_of(family: str, kind: str, folder: Path) -> Path:
    """A trained one with Q8_0 weights, or a random one with Q4_K weights."""
    if kind == "Q8_0":
        return model_file(f"{family}-tiny", "Q8_0", folder)
    n_mtp = int(family != "llama")
    tiny = Tiny(architecture=family, elements={"": ElementType[kind]}, n_mtp=n_mtp, **WIDE)
    return write_tiny(folder, tiny)


@contextmanager
def opened(family: str, kind: str, folder: Path, *, spec: str, cached: bool, slots: int) -> Iterator[Loaded]:
    """With what an engine chooses by itself."""
    options = EngineOptions(
        model=model_of(family, kind, folder),
        spec=spec,  # type: ignore[arg-type]
        prefix_cache_max_mib="auto" if cached else 0,
        slots=slots,
        chunk=32,
        max_ctx=512,
        device="CPU",
        threads=1,
    )
    loaded = load(options, lambda _: None)
    try:
        yield loaded
    finally:
        loaded.core.close()


def eight(n_orders: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Eight requests in some orders, at several times each."""
    return [(order, turns) for i, order in enumerate(ORDERS[:n_orders]) for turns in AT[i:]]


@pytest.mark.parametrize(
    ("family", "kind", "spec", "cached"),
    [
        ("qwen35", "Q4_K", "mtp", False),
        ("qwen35", "Q8_0", "off", False),
        ("qwen35moe", "Q8_0", "mtp", True),
        ("qwen4exp", "Q4_K", "mtp", False),
    ],
)
def test_quantised_models_answer_four_together_as_alone(
    family: str, kind: str, spec: str, cached: bool, tmp_path: Path
) -> None:
    with opened(family, kind, tmp_path, spec=spec, cached=cached, slots=4) as loaded:
        assert loaded.info.decode_rows == 4, loaded.info.decode_reason
        assert_alone_is_together(loaded, short_and_long(), list(every_order(every_time=False))[::5])


@pytest.mark.parametrize(
    ("family", "kind", "spec", "rows"),
    [("llama", "Q8_0", "off", 8), ("qwen35", "Q8_0", "mtp", 8), ("qwen35", "Q4_K", "mtp", 7)],
)
def test_eight_answers_are_those_of_each_alone(
    family: str, kind: str, spec: str, rows: int, tmp_path: Path
) -> None:
    """Rows of random Q4_K weights agree up to seven, so eight slots take two forwards."""
    with opened(family, kind, tmp_path, spec=spec, cached=False, slots=8) as loaded:
        assert loaded.info.decode_rows >= rows, loaded.info.decode_reason
        assert_alone_is_together(loaded, short_and_long(lengths=EIGHT), eight(1)[:2])


@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_token_does_not_tell_whether_the_drafter_reads_the_prompt(
    family: str, kind: str, tmp_path: Path
) -> None:
    """It reads what the head reads of every row; the last row's logits are made of that row alone."""
    with opened(family, kind, tmp_path, spec="mtp", cached=False, slots=1) as loaded:
        for request in short_and_long(1, lengths=(2, 7, 10, 22, 31, 42)):
            first = [answered(loaded, replace(request, spec=spec)).logprobs for spec in (None, "off")]
            assert first[0] == first[1]


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("spec", ["off", "mtp"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_models_answer_in_every_order_as_alone(
    family: str, kind: str, spec: str, cached: bool, tmp_path: Path
) -> None:
    """Every order at all times, and eight where as many slots decode together, or in two forwards."""
    with opened(family, kind, tmp_path, spec=spec, cached=cached, slots=4) as loaded:
        assert_alone_is_together(loaded, short_and_long(), every_order(every_time=True))
    with opened(family, kind, tmp_path, spec=spec, cached=cached, slots=8) as loaded:
        assert_alone_is_together(loaded, short_and_long(lengths=EIGHT), eight(3))
