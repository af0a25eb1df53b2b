"""Rows of a big table are what ggml reads, and reading some leaves the rest of the file alone."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyggml_dflash.errors import EngineClosed, UnsupportedModelError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.ggml.mapped_rows import MappedRows, can_expand
from tests.ggml.handmade import gguf, row
from tests.ggml.pages import pages_in_memory, pages_of, resident_bytes
from tests.reference.blocks import WEIGHT_TYPES, numbers, random_tensor

GIB = 2**30


def rows_of(file: GgufFile, name: str = "table") -> MappedRows:
    return file.rows(file.tensors[name])


def read(rows: MappedRows, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    out = np.full(len(ids) * rows.width, np.nan, np.float32)
    rows.expand(rows.read(ids), out)
    return out.reshape(len(ids), rows.width)


@pytest.mark.parametrize("element", WEIGHT_TYPES, ids=lambda e: e.label)
def test_rows_of_every_type_are_the_numbers_that_ggml_reads(tmp_path: Path, element: ElementType) -> None:
    width, n_rows, rng = 2 * max(element.block, 80), 300, np.random.default_rng(1)
    data = random_tensor(element, (width, n_rows), spread=1.0, rng=rng)
    writer = GgufWriter()
    writer.add_tensor("before", np.zeros(3, np.float32))
    writer.add_raw("table", data, shape=(width, n_rows), element=element)
    ids = rng.integers(0, n_rows, 100).astype(np.int32)
    with GgufFile.open(writer.write(tmp_path / "t.gguf")[0]) as file:
        found = read(rows_of(file), ids)
    assert found.tolist() == numbers(element, (width, n_rows), data)[ids].tolist()


def test_types_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    refused = {e for e in ElementType if not can_expand(e)}
    assert refused == {ElementType[n] for n in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")}
    writer = GgufWriter()
    writer.add_tensor("table", np.zeros((4, 4), np.int32))
    with (
        GgufFile.open(writer.write(tmp_path / "t.gguf")[0]) as file,
        pytest.raises(UnsupportedModelError, match="rows of type i32 cannot be turned into numbers"),
    ):
        rows_of(file)


def test_closed_rows_let_the_mapping_go(tmp_path: Path) -> None:
    writer = GgufWriter()
    writer.add_tensor("table", np.ones((3, 4), np.float32))
    file = GgufFile.open(writer.write(tmp_path / "t.gguf")[0])
    rows, (mapping,) = rows_of(file), file.maps
    file.close()
    with pytest.raises(BufferError):
        mapping.close()
    for _ in range(2):
        rows.close()
    mapping.close()


def test_rows_outlive_the_file_and_a_closed_file_gives_none(tmp_path: Path) -> None:
    writer, values = GgufWriter(), np.arange(12, dtype=np.float32).reshape(4, 3)
    writer.add_tensor("table", values)
    file = GgufFile.open(writer.write(tmp_path / "t.gguf")[0])
    rows = rows_of(file)
    file.close()
    assert read(rows, np.array([2, 0], np.int32)).tolist() == values[[2, 0]].tolist()
    with pytest.raises(EngineClosed, match=r"t\.gguf is closed"):
        rows_of(file)


def sparse_table(path: Path, *, width: int, n_rows: int) -> None:
    """A file with one Q8_0 table of zeros that takes no room on the disk."""
    header = gguf([], [row("table", (width, n_rows), ElementType.Q8_0)])
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(len(header) + n_rows * ElementType.Q8_0.row_bytes(width))


def test_rows_of_a_table_of_54_gb_are_found(tmp_path: Path) -> None:
    path, width, n_rows, rng = tmp_path / "big.gguf", 160, 320_001_536, np.random.default_rng(4)
    sparse_table(path, width=width, n_rows=n_rows)
    wanted = [0, 25_264_513, 25_264_514, 2**27, n_rows - 1]  # around byte 2^32, and the last
    data = random_tensor(ElementType.Q8_0, (width, len(wanted)), spread=1.0, rng=rng)
    with GgufFile.open(path) as file, path.open("r+b") as target:
        for i, raw in zip(wanted, data.reshape(len(wanted), -1), strict=True):
            target.seek(file.tensors["table"].offset + i * len(raw))
            target.write(raw.tobytes())
        target.flush()
        found = read(rows_of(file), np.array(wanted, np.int32))
    assert found.tolist() == numbers(ElementType.Q8_0, (width, len(wanted)), data).tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are in memory")
def test_a_thousand_steps_over_a_table_of_2_gib_touch_the_pages_of_their_rows_only(tmp_path: Path) -> None:
    width, n_heads = 160, 16
    path = tmp_path / "big.gguf"
    n_rows = 2 * GIB // ElementType.Q8_0.row_bytes(width) + 1
    sparse_table(path, width=width, n_rows=n_rows)
    assert path.stat().st_size > 2 * GIB
    rng = np.random.default_rng(3)
    with GgufFile.open(path) as file:
        rows, mapping = rows_of(file), file.mapping(0)
        held_before, wanted = pages_in_memory(mapping), set()
        for _ in range(1000):
            ids = rng.integers(0, n_rows, n_heads).astype(np.int32)
            wanted |= pages_of(file.tensors["table"], ids)
            assert not read(rows, ids).any()
        held = pages_in_memory(mapping)
        assert wanted <= held
        assert held - held_before <= wanted
        assert 0 < resident_bytes(path) <= mmap.PAGESIZE * len(held) < 300 * 2**20
