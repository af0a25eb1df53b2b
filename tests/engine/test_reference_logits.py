"""Logits, choices and greedy texts of stored models are those that independent programs computed.

The numbers for F32 files are Hugging Face's in single precision; those for other files are llama.cpp's, on
the very same weights. Two correct programs differ by rounding, so each kind of file has a tolerance: 3e-3 in
single precision, 0.2 where every product rounds activations to 11 bits, 0.6 (Q8_0) and 1.5 (Q4_K_M) where it
rounds them to 8. A choice is compared where its margin is above twice that; below, rounding decides.

With experts a rounding can choose another expert, and the state carries that on: two chunk sizes of one Q8_0
file differ by up to 6 in the 5 % of rows behind such a flip. There, most rows are held to the tolerance, and
all of them to the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.engine.core import EngineCore
from tests.reference.opened import Floats, OnOff, continued, on_the_cpu, open_core
from tests.reference.stored import Kind, Stored, model_file, stored

WHOLE = 640  # rows of the longest prompt
FLASH: tuple[OnOff, ...] = ("on", "off")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logits may be from the stored ones; `share` of the rows, at least, within `row`."""

    row: float
    mean: float
    share: float = 1.0
    wide: float | None = None  # margin from which on a choice must be equal; None: twice `row`

    @property
    def margin(self) -> float:
        """Choices with a larger margin are equal."""
        return 2 * self.row if self.wide is None else self.wide


EXACT = Tolerance(row=3e-3, mean=1e-4)
HALF = Tolerance(row=0.2, mean=0.02)
Q8_0 = Tolerance(row=0.6, mean=0.05)
Q4_K_M = Tolerance(row=1.5, mean=0.15)
EXPERTS_HALF = Tolerance(row=0.6, mean=0.15, share=0.8, wide=4.0)
EXPERTS_Q8_0 = Tolerance(row=0.6, mean=0.15, share=0.9, wide=4.0)


@dataclass(frozen=True, slots=True)
class File:
    """A model file, and the numbers it is held to: those for `numbers`, or of single precision for None."""

    model: str
    kind: Kind
    numbers: Kind | None
    tolerance: Tolerance


FILES = (
    File("llama-tiny", "F32", None, EXACT),
    File("qwen3-tiny", "F32", None, EXACT),
    File("qwen35-tiny", "F32", None, EXACT),
    File("qwen35moe-tiny", "F32", None, EXACT),
    File("qwen4exp-tiny", "F32", None, EXACT),
    File("llama-tiny", "F16", None, HALF),
    File("qwen3-tiny", "F16", "F16", HALF),
    File("qwen35-tiny", "F16", None, HALF),
    File("qwen35moe-tiny", "F16", None, EXPERTS_HALF),
    File("llama-tiny", "Q8_0", "Q8_0", Q8_0),
    File("qwen35-tiny", "Q8_0", "Q8_0", Q8_0),
    File("qwen35moe-tiny", "Q8_0", "Q8_0", EXPERTS_Q8_0),
    File("qwen4exp-tiny", "Q8_0", "Q8_0", EXPERTS_Q8_0),
    File("qwen3-tiny", "Q4_K_M", "Q4_K_M", Q4_K_M),
    File("qwen35-wide", "Q4_K_M", "Q4_K_M", Q4_K_M),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A file, and how it is run."""

    file: File
    chunk: int
    flash_attn: OnOff
    repack: OnOff = "on"

    def __str__(self) -> str:
        chunk = "whole" if self.chunk == WHOLE else f"chunk{self.chunk}"
        how = f"{chunk}-flash_{self.flash_attn}-repack_{self.repack}"
        return f"{self.file.model}-{self.file.kind}-{how}"


def settings() -> Iterator[Setting]:
    """Every chunk size with and without flash attention; quantised weights also as they lie in the file."""
    for file in FILES:
        for flash in FLASH:
            chunks = (7, WHOLE) if file.kind == "F16" else (1, 7, 64, WHOLE)
            if file.model == "qwen4exp-tiny" and file.numbers is None:
                chunks = (1, 3, 64, 256, WHOLE)  # groups of 8 tokens are cut in every way
            yield from (Setting(file, chunk, flash) for chunk in chunks)
        if file.kind.startswith("Q"):
            yield from (Setting(file, chunk, "on", "off") for chunk in (1, WHOLE))


@dataclass(frozen=True, slots=True)
class Run:
    """A model that is open under a setting, what it computed, and what it is held to."""

    setting: Setting
    core: EngineCore
    expected: Stored
    logits: tuple[Floats, ...]  # per prompt: [n_tokens, n_vocab]

    @property
    def tolerance(self) -> Tolerance:
        """The file's."""
        return self.setting.file.tolerance


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=list(settings()), ids=str)
def run(request: pytest.FixtureRequest, folder: Path) -> Iterator[Run]:
    setting: Setting = request.param
    file, expected = setting.file, stored(setting.file.model, setting.file.numbers)
    if setting.chunk < 64:  # the longest prompt alone would take half of all time
        expected = replace(expected, prompts=expected.prompts[:-1])
    if setting.chunk == 1:  # a forward per token; of the prompts, one enters the second bucket of cache rows
        some = (*expected.prompts[:3], expected.prompts[-1])
        expected = replace(expected, prompts=some, texts=expected.texts[:1])
    options = on_the_cpu(
        model_file(file.model, file.kind, folder),
        max_ctx=768,
        chunk=setting.chunk,
        flash_attn=setting.flash_attn,
        repack=setting.repack,
    )
    with open_core(options) as core:
        yield Run(setting, core, expected, tuple(core.logits(p.tokens) for p in expected.prompts))


def test_logits_are_the_stored_ones(run: Run) -> None:
    pairs = zip(run.logits, run.expected.prompts, strict=True)
    off = np.concatenate([np.abs(found[p.positions] - p.logits) for found, p in pairs])
    assert off.mean() <= run.tolerance.mean
    assert np.mean(off.max(axis=1) <= run.tolerance.row) >= run.tolerance.share


def test_the_best_token_is_the_stored_one_at_every_clear_position(run: Run) -> None:
    for found, prompt in zip(run.logits, run.expected.prompts, strict=True):
        clear = prompt.margin > run.tolerance.margin
        if run.tolerance is EXACT:
            clear[prompt.positions] = True
        np.testing.assert_array_equal(found.argmax(axis=1)[clear], prompt.argmax[clear])


def test_greedy_texts_are_the_stored_ones_at_every_clear_step(run: Run) -> None:
    for text in run.expected.texts:
        steps = np.array(list(continued(run.core, text.prompt, text.tokens)))
        clear = text.margin > run.tolerance.margin
        assert clear.all() or run.tolerance is not EXACT
        np.testing.assert_array_equal(steps.argmax(axis=1)[clear], np.array(text.tokens)[clear])
        if text.last_logits is not None and run.tolerance.share == 1:
            np.testing.assert_allclose(steps[-1], text.last_logits, rtol=0, atol=run.tolerance.row)
