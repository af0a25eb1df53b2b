"""An n-gram table of gigabytes stays in its file; a model with one takes the memory of the rest."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch.qwen4exp.ngram import TABLE, NgramHash, read_ngram_config
from pyggml_dflash.errors import DamagedFileError, ModelFileError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.config import ConfigReader
from tests.engine.hostile import edited
from tests.engine.tiny import opened, prompt
from tests.ggml.pages import pages_in_memory, pages_of, resident_bytes
from tests.reference.stored import model_file

WIDTH, N_HEADS = 8, 8  # of the tiny model's table
HEAD_ROWS = 2 * 2**30 // (4 * WIDTH * N_HEADS) + 1
LAYERS = (True, True, True, False, True, True, True, False)


@pytest.fixture
def table_part(tmp_path: Path) -> Path:
    """The tiny model, every tensor in a part of its own: the part whose only tensor is 2 GiB of hole."""
    keys = {
        "qwen4exp.ple.head_vocab_sizes": np.full(N_HEADS, HEAD_ROWS, np.uint64),
        "qwen4exp.ple.head_offsets": HEAD_ROWS * np.arange(N_HEADS, dtype=np.uint64),
    }
    source = model_file("qwen4exp-tiny", "F32", tmp_path)
    with GgufFile.open(source) as file:
        n_parts = len(file.tensors)
    with GgufFile.open(edited(source, tmp_path / "big.gguf", keys=keys, n_parts=n_parts)) as file:
        table = file.tensors[TABLE]
        path = file.parts[table.part]
    header = bytearray(path.read_bytes()[: table.offset])
    sizes = header.index(TABLE.encode()) + len(TABLE) + 4  # behind the number of dimensions
    struct.pack_into("<QQ", header, sizes, WIDTH, N_HEADS * HEAD_ROWS)
    with path.open("wb") as part:
        part.write(header)
        part.truncate(table.offset + 4 * WIDTH * N_HEADS * HEAD_ROWS)
    return path


def own_memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are in memory")
def test_a_table_of_2_gib_is_read_where_tokens_need_it_and_nowhere_else(table_part: Path) -> None:
    tokens = prompt(100)
    before = own_memory()
    with GgufFile.open(table_part) as file, opened(table_part, max_ctx=2048, chunk=32) as engine:
        mapping = file.mapping(file.tensors[TABLE].part)
        held_before = pages_in_memory(mapping)
        assert len(held_before) < 256  # the header, and what was read beside it
        assert TABLE not in repr(engine.memory())
        answer = engine.generate(tokens, max_tokens=1001, ignore_eos=True).tokens
        assert len(answer) == 1001
        config = read_ngram_config(ConfigReader(file, "qwen4exp"), LAYERS, 768)
        assert config is not None
        ids = NgramHash(config).rows([*tokens, *answer[:-1]], ())
        wanted = pages_of(file.tensors[TABLE], ids)
        held = pages_in_memory(mapping)
        assert wanted <= held
        assert held - held_before <= wanted
        mapped_twice = 2 * os.sysconf("SC_PAGESIZE") * len(held)
        assert 0 < resident_bytes(table_part) <= mapped_twice
        assert own_memory() - before < 300 * 2**20


def test_a_cut_table_and_a_missing_one_are_named(table_part: Path) -> None:
    first = next(table_part.parent.glob("big-00001-of-*.gguf"))
    os.truncate(table_part, table_part.stat().st_size - 2**30)
    with pytest.raises(
        DamagedFileError, match=rf"{table_part.name}: tensor '{TABLE}' needs bytes .*truncated"
    ):
        opened(first)
    table_part.unlink()
    with pytest.raises(ModelFileError, match=rf"1 of \d+ parts missing: {table_part.name}; there: "):
        opened(first)
