"""Faulty files of qwen4exp: each is refused, or warned about, in words that name what is wrong."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch.qwen4exp.ngram import TABLE
from pyggml_dflash.errors import ModelFileError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from tests.cli.dflash_command import dflash
from tests.engine.hostile import Keys, edited
from tests.engine.tiny import opened
from tests.reference.stored import model_file

RATIOS = "qwen4exp.attention.compress_ratios"
N_PARTS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_file("qwen4exp-tiny", "F32", tmp_path_factory.mktemp("model"))


def refusal(path: Path) -> str:
    """The message of a file that does not open; the command line's exit code for it is 3."""
    with pytest.raises(ModelFileError) as raised:
        opened(path)
    assert raised.value.exit_code == 3
    return str(raised.value)


METADATA: dict[str, tuple[Keys, str]] = {
    "two PLE layers": (
        {"qwen4exp.ple.layers": [1, 2]},
        "ple.layers is [1, 2]; the file has one set of hash constants, so only one layer is possible",
    ),
    "a PLE layer that is attention": (
        {"qwen4exp.ple.layers": [3]},
        "ple.layers is [3], an attention layer; delta nets are layers 0, 1, 2, 4, 5, 6",
    ),
    "too few multipliers": (
        {"qwen4exp.ple.layer_multipliers": np.ones(2, np.uint64)},
        "ple.layer_multipliers has 2 numbers; the n-gram embedding needs 3",
    ),
    "too few sizes": (
        {"qwen4exp.ple.head_vocab_sizes": np.ones(7, np.uint64)},
        "ple.head_vocab_sizes has 7 numbers; the n-gram embedding needs 8",
    ),
    "too few offsets": (
        {"qwen4exp.ple.head_offsets": np.zeros(0, np.uint64)},
        "ple.head_offsets has 0 numbers; the n-gram embedding needs 8",
    ),
    "a head behind the table": (
        {"qwen4exp.ple.head_offsets": np.full(8, 1700, np.uint64)},
        f"reads rows 1700 to 1910; tensor '{TABLE}' has 1856",
    ),
}


@pytest.mark.parametrize(("keys", "words"), METADATA.values(), ids=METADATA)
def test_contradictory_metadata_is_refused(tmp_path: Path, model: Path, keys: Keys, words: str) -> None:
    assert words in refusal(edited(model, tmp_path / "bad.gguf", keys=keys))


def test_a_missing_array_is_named(tmp_path: Path, model: Path) -> None:
    path = edited(model, tmp_path / "bad.gguf", without=("qwen4exp.ple.head_offsets",))
    assert "'qwen4exp.ple.head_offsets' (an array of integers) is missing" in refusal(path)


def test_a_k_quant_of_a_narrow_table_is_refused_with_types_that_fit(tmp_path: Path, model: Path) -> None:
    content = bytearray(model.read_bytes())
    type_at = content.index(TABLE.encode()) + len(TABLE) + 4 + 2 * 8
    struct.pack_into("<I", content, type_at, ElementType.Q4_K)
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert (
        f"tensor '{TABLE}' has rows of 8 elements, not a whole number of q4_k blocks of 256; f16 would fit"
        in refusal(path)
    )


def cut(parts: list[Path]) -> None:
    """The download of the last part stopped."""
    parts[-1].write_bytes(parts[-1].read_bytes()[:-1000])


def swap(parts: list[Path]) -> None:
    """Two parts have each other's name."""
    first, second = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(second)
    parts[2].write_bytes(first)


SETS: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "cut": (cut, r"bad-00003-of-00003\.gguf: tensor '.*' needs bytes .* \(truncated\?\)"),
    "missing": (
        lambda parts: parts[1].unlink(),
        r"1 of 3 parts missing: bad-00002-of-00003\.gguf; there: bad-00001-of-00003\.gguf, bad-00003",
    ),
    "swapped": (
        swap,
        r"by its metadata this is part [23] of 3, (by its name part 2 of 3|so its name must end in -00002)",
    ),
}


@pytest.mark.parametrize("given", [0, 2])
@pytest.mark.parametrize(("spoil", "words"), SETS.values(), ids=SETS)
def test_a_spoilt_set_is_refused_whichever_part_is_given(
    tmp_path: Path, model: Path, spoil: Callable[[list[Path]], None], words: str, given: int
) -> None:
    with GgufFile.open(edited(model, tmp_path / "bad.gguf", n_parts=N_PARTS)) as file:
        parts = list(file.parts)
    spoil(parts)
    with pytest.raises(ModelFileError, match=words):
        opened(parts[given])


def test_a_set_gives_the_text_of_the_single_file_whichever_part_is_given(tmp_path: Path, model: Path) -> None:
    with GgufFile.open(edited(model, tmp_path / "set.gguf", n_parts=N_PARTS)) as file:
        parts = file.parts
        assert {t.part for t in file.tensors.values()} == {0, 1, 2}
    found = []
    for path in (model, *parts):
        with opened(path) as engine:
            found.append(engine.generate([5, 6, 7, 756, 8], max_tokens=12, ignore_eos=True).tokens)
    assert found == [found[0]] * (1 + N_PARTS)


@pytest.mark.parametrize("change", ["zeros", "absent"])
def test_an_indexer_that_is_switched_off_everywhere_is_warned_about(
    tmp_path: Path, model: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys: Keys = {RATIOS: [0] * 9} if change == "zeros" else {}
    path = edited(model, tmp_path / "dense.gguf", keys=keys, without=(RATIOS,))
    with caplog.at_level(logging.WARNING), opened(path) as engine:
        assert len(engine.generate([1, 2, 3], max_tokens=2, ignore_eos=True).tokens) == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("pyggml_dflash.arch")]
    assert str(path) in warning
    assert RATIOS in warning
    assert "beyond 64 tokens" in warning


def test_the_command_line_shows_the_warning_and_a_good_file_gives_none(tmp_path: Path, model: Path) -> None:
    few = ("-p", "a", "-n", "1", "--threads", "1")
    dense = edited(model, tmp_path / "dense.gguf", keys={RATIOS: [0] * 9})
    done, good = dflash("run", str(dense), *few), dflash("run", str(model), *few)
    assert (done.code, good.code) == (0, 0)
    assert RATIOS in done.err
    assert RATIOS not in good.err
