"""What is chosen about drafts is used or refused: width, block, the layers that are read, whether at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.errors import UnsupportedModelError, UsageError
from pyggml_dflash.ggml.gguf import GgufFile
from tests.drafts.drafted import draft_file
from tests.drafts.generated import loaded_model, run, telling
from tests.drafts.speculated import any_draft, right_up_to
from tests.engine.hostile import edited
from tests.reference.stored import DATA, model_file

PROMPT = np.random.default_rng(4).integers(0, 750, 30).tolist()
N = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return model_file("qwen35-tiny", "F32", folder)


@pytest.fixture(scope="module")
def plain_answer(target: Path) -> tuple[int, ...]:
    with loaded_model(target, spec="off") as loaded:
        return run(loaded, PROMPT, max_tokens=N).tokens


def widest(loaded: Loaded) -> int:
    """Rows of the widest verify forward that it can run."""
    recording = loaded.core._forwards.recording
    assert recording is not None
    return recording.max_width


def check_widths(loaded: Loaded, answer: tuple[int, ...]) -> None:
    """Widths up to the widest give the answer, with a draft's own proposals and with right ones."""
    for width in {2, 3, 5, 8, 13, widest(loaded)} & {*range(2, widest(loaded) + 1)}:
        fixed = replace(loaded, spec_width=width)
        found = run(fixed, PROMPT, max_tokens=N)
        with telling(loaded, right_up_to(width, [*PROMPT, *answer])):
            told = run(fixed, PROMPT, max_tokens=N)
        assert found.tokens == told.tokens == answer
        assert told.speculation is not None
        assert told.speculation.drafted == told.speculation.accepted
        assert told.speculation.verify_steps + told.speculation.plain_steps == -(-(N - 1) // width)


@pytest.mark.parametrize("block", [2, 4, 8, 16, 40])
@pytest.mark.parametrize("name", ["dflash-tiny", "dflash-swa-tiny", "dflash2-tiny"])
def test_blocks_of_any_size_work_at_every_width_up_to_theirs(
    name: str, block: int, target: Path, folder: Path, tmp_path: Path, plain_answer: tuple[int, ...]
) -> None:
    draft = edited(draft_file(name, folder), tmp_path / "d.gguf", keys={"dflash.block_size": block})
    with loaded_model(target, draft=draft) as loaded:
        assert widest(loaded) == min(16, block)
        check_widths(loaded, plain_answer)


def test_a_block_wider_than_the_draft_was_trained_for_is_refused(target: Path, folder: Path) -> None:
    draft = draft_file("dflash-tiny", folder)
    for width in (9, 16):
        with (
            pytest.raises(UsageError, match=f"spec_width is {width}; .* blocks of 8"),
            loaded_model(target, draft=draft, spec_width=width),
        ):
            pass


@pytest.mark.parametrize(("width", "most"), [("auto", 4), (2, 2), (16, 16)])
def test_an_mtp_block_drafts_up_to_any_width(
    width: int, most: int, target: Path, plain_answer: tuple[int, ...]
) -> None:
    with loaded_model(target, spec="mtp", spec_width=width) as loaded:
        assert widest(loaded) == most
        check_widths(loaded, plain_answer)


LISTED: tuple[dict[str, Any], ...] = (
    {},
    {"keys": {"qwen35.attention.recurrent_layers": np.array([True, True, True, False] * 2)}},
    {"without": ("qwen35.attention.recurrent_layers",)},
)


@pytest.mark.parametrize("listed", LISTED, ids=["whole-list", "list-of-the-trunk", "no-list"])
def test_an_mtp_block_is_used_when_asked_for_and_left_alone_else(
    listed: dict[str, Any], target: Path, tmp_path: Path, plain_answer: tuple[int, ...]
) -> None:
    """Files differ in whether arrays by layer have an entry for the block."""
    path = edited(target, tmp_path / "m.gguf", **listed)
    sizes = []
    for spec in ("off", "mtp"):
        with loaded_model(path, spec=spec) as loaded:
            result = run(loaded, PROMPT, max_tokens=N)
            assert result.tokens == plain_answer
            assert (result.speculation is None) == (spec == "off")
            sizes.append(sum(loaded.info.weight_bytes.values()))
    assert sizes[0] < sizes[1]


def test_hopeless_drafts_are_put_aside(target: Path, folder: Path) -> None:
    """One draft in twenty is right: after a few dozen tokens nearly all come from plain steps."""
    n, rng = 300, np.random.default_rng(9)
    with loaded_model(target, spec="off", max_ctx=1024) as loaded:
        text = [*PROMPT, *run(loaded, PROMPT, max_tokens=n, ignore_eos=True).tokens]
    right, wrong = right_up_to(16, text), right_up_to(0, text)
    with (
        loaded_model(target, draft=draft_file("dflash-tiny", folder), max_ctx=1024) as loaded,
        telling(loaded, lambda *args: (right if rng.random() < 0.05 else wrong)(*args)),
    ):
        stats = []
        for n_tokens in (60, n):
            result = run(loaded, PROMPT, max_tokens=n_tokens, ignore_eos=True)
            assert [*PROMPT, *result.tokens] == text[: len(PROMPT) + n_tokens]
            assert result.speculation is not None
            stats.append(result.speculation)
    assert stats[0].plain_steps > 30
    assert stats[1].plain_steps > 0.8 * n
    assert " plain steps and give " in str(result.plain_reason)


@pytest.fixture(scope="module")
def shipped_draft(folder: Path) -> Path:
    return any_draft("pico-dflash", folder)


def layers_of(draft: Path) -> list[int]:
    """Target layers whose inputs the draft reads."""
    with GgufFile.open(draft) as file:
        return list(file.get_ints("dflash.target_layers"))


def mean_length(draft: Path) -> float:
    """Tokens per verify forward of the shipped model, over the beginnings of its stored stories."""
    accepted = steps = 0
    with loaded_model(DEFAULT_MODEL, draft=draft, spec_width=8) as loaded:
        for told in json.loads((DATA / "pico" / "reference.json").read_text())["prompts"]:
            stats = run(loaded, told["prompt_ids"], max_tokens=60).speculation
            assert stats is not None
            accepted, steps = accepted + stats.accepted, steps + stats.verify_steps
    return 1 + accepted / steps


def test_reading_the_layers_before_the_right_ones_shows(shipped_draft: Path, tmp_path: Path) -> None:
    """Files count layer inputs from 1 or outputs from 0: one off, a draft still runs, and drafts worse.

    4.07 and 3.60 were measured.
    """
    before = [layer - 1 for layer in layers_of(shipped_draft)]
    shifted = edited(shipped_draft, tmp_path / "d.gguf", keys={"dflash.target_layers": before})
    right = mean_length(shipped_draft)
    assert right > 3.5
    assert mean_length(shifted) < 0.93 * right


def test_a_draft_that_reads_the_layers_behind_the_right_ones_is_refused(
    shipped_draft: Path, tmp_path: Path
) -> None:
    behind = [layer + 1 for layer in layers_of(shipped_draft)]
    draft = edited(shipped_draft, tmp_path / "d.gguf", keys={"dflash.target_layers": behind})
    with pytest.raises(UnsupportedModelError, match="layer 12"), loaded_model(DEFAULT_MODEL, draft=draft):
        pass
