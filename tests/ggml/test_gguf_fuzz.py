"""Damaged headers end in our error or in a file whose tensors are all in range; nothing else."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.errors import ModelFileError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile, Strings
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.ggml.mutations import Mutant, fields, mutants

MODELS = Path(__file__).parents[1] / "data" / "models"
FILES = ("llama-tiny-Q8_0.gguf", "qwen35-tiny-Q8_0.gguf")
KIB = 1024


def put(path: Path, mutant: Mutant) -> Path:
    """Under a new inode, so that no mapping of the last one sees the change."""
    path.unlink(missing_ok=True)
    path.write_bytes(mutant.data)
    return path


def opens(path: Path) -> bool:
    """Whether the file opens; then all it says is used, so that a lie would show."""
    try:
        file = GgufFile.open(path)
    except ModelFileError as error:
        message = str(error)
    else:
        use(file)
        return True
    assert path.parent.name in message
    assert len(message) < 1000
    return False


def use(file: GgufFile) -> None:
    with file:
        views = {t.name: file.data(t) for t in file.tensors.values()}
        assert sum(view.nbytes for view in views.values()) <= file.n_bytes
        assert all(views[t.name].nbytes == t.n_bytes > 0 for t in file.tensors.values())
        assert all(t.n_elements % t.type.block == 0 for t in file.tensors.values())
        assert all(list(v) == list(v) for v in file.metadata.values() if isinstance(v, Strings))


def every(n: int, items: Iterator[Mutant]) -> Iterator[Mutant]:
    return (item for i, item in enumerate(items) if i % n == 0)


@pytest.mark.parametrize("n", [400, pytest.param(1600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_header_is_refused_or_read_within_the_file(name: str, n: int, tmp_path: Path) -> None:
    good = (MODELS / name).read_bytes()
    outcomes = [opens(put(tmp_path / name, m)) for m in mutants(good, seed=11, n=n)]
    assert len(outcomes) >= 400 + n
    assert outcomes.count(False) > outcomes.count(True) > 0


@pytest.mark.parametrize("n", [400, pytest.param(1600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_header_takes_at_most_twice_the_memory_of_the_file(
    name: str, n: int, tmp_path: Path
) -> None:
    good = (MODELS / name).read_bytes()
    tracemalloc.start()
    try:
        for mutant in every(17, mutants(good, seed=12, n=n)):
            path = put(tmp_path / name, mutant)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            opens(path)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 2 * len(mutant.data) + 256 * KIB, mutant.name
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FILES)
def test_a_cut_anywhere_is_refused(name: str, tmp_path: Path) -> None:
    good = (MODELS / name).read_bytes()
    for mutant in mutants(good, seed=0, n=0):
        assert not opens(put(tmp_path / name, mutant)), mutant.name


def test_a_damaged_part_of_a_set_is_refused_or_read_within_the_set(tmp_path: Path) -> None:
    writer = GgufWriter()
    writer.set("general.architecture", "none")
    for i in range(4):
        writer.add_tensor(f"blk.{i}.w", np.full((4, 32), i, np.float32))
    writer.add_raw("q", bytes(34 * 3), shape=(32, 3), element=ElementType.Q8_0)
    parts = writer.write(tmp_path / "set.gguf", n_parts=2)
    outcomes = []
    for changed in parts:
        good = changed.read_bytes()
        outcomes += [opens(put(changed, m) and parts[0]) for m in mutants(good, seed=13, n=200)]
        put(changed, Mutant("as it was", good))
    assert outcomes.count(False) > outcomes.count(True) > 0
    assert opens(parts[1])


def test_the_walk_of_the_mutator_meets_the_data(tmp_path: Path) -> None:
    """A walk that lost its way would damage tensor bytes, which nobody checks."""
    for name in FILES:
        last = fields((MODELS / name).read_bytes())[-1]
        with GgufFile.open(MODELS / name) as file:
            first = min(t.offset for t in file.tensors.values())
            assert 0 <= first - (last.offset + last.n_bytes) < file.alignment
