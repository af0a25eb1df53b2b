"""Files written here read back as they were meant, by our reader and by ggml's."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pyggml_dflash.errors import ModelFileError, UsageError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.gguf_values import MetaValue, Strings, ValueType
from pyggml_dflash.ggml.gguf_writer import GgufWriter, part_names
from tests.ggml import gguf_oracle

MODELS = Path(__file__).parents[1] / "data" / "models"


def plain(value: MetaValue) -> Any:
    """Arrays as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, Strings) else value


def agree(path: Path) -> None:
    """Our reader and ggml's find the same."""
    with GgufFile.open(path) as file:
        assert {k: plain(v) for k, v in file.metadata.items()} == gguf_oracle.metadata(path)
        assert [
            (t.name, [*t.shape, 1, 1, 1, 1][:4], int(t.type), t.offset, t.n_bytes)
            for t in file.tensors.values()
        ] == gguf_oracle.tensors(path)


@pytest.mark.parametrize("name", ["llama-tiny-Q8_0.gguf", "qwen35-tiny-Q8_0.gguf"])
def test_published_files_read_as_ggml_reads_them(name: str) -> None:
    agree(MODELS / name)


# Random files

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=15)
keys = names.filter(lambda key: key != "general.alignment" and not key.startswith("split."))
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


def scalars(kind: ValueType) -> st.SearchStrategy[Any]:
    if kind is ValueType.STR:
        return text
    if kind is ValueType.BOOL:
        return st.booleans()
    if kind in (ValueType.F32, ValueType.F64):
        return st.floats(allow_nan=False, width=32 if kind is ValueType.F32 else 64)
    limits = np.iinfo(kind.dtype)
    return st.integers(int(limits.min), int(limits.max))


def values(kind: ValueType) -> st.SearchStrategy[tuple[ValueType, Any]]:
    return st.tuples(st.just(kind), scalars(kind) | st.lists(scalars(kind), max_size=20))


typed_values = st.sampled_from([k for k in ValueType if k is not ValueType.ARRAY]).flatmap(values)


@st.composite
def raw_tensors(draw: st.DrawFn) -> tuple[ElementType, tuple[int, ...], bytes]:
    element = draw(st.sampled_from(ElementType))
    rest = draw(st.lists(st.integers(1, 3), max_size=3))
    shape = (element.block * draw(st.integers(1, 3)), *rest)
    n_bytes = int(np.prod(shape)) // element.block * element.block_bytes
    return element, shape, np.random.default_rng(draw(st.integers(0, 99))).bytes(n_bytes)


@settings(max_examples=150, deadline=None)
@given(
    metadata=st.dictionaries(keys, typed_values, max_size=8),
    tensors=st.dictionaries(names, raw_tensors(), max_size=6),
    alignment=st.sampled_from([8, 32, 64, 4096]),
    data=st.data(),
)
def test_what_is_written_reads_back(
    metadata: dict[str, tuple[ValueType, Any]],
    tensors: dict[str, tuple[ElementType, tuple[int, ...], bytes]],
    alignment: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    writer = GgufWriter(alignment=alignment)
    for key, (kind, value) in metadata.items():
        writer.set(key, value, kind)
    for name, (element, shape, raw) in tensors.items():
        writer.add_raw(name, raw, shape=shape, element=element)
    n_parts = data.draw(st.integers(1, max(1, len(tensors))))
    paths = writer.write(tmp_path_factory.mktemp("written") / "a.gguf", n_parts=n_parts)
    with GgufFile.open(paths[-1]) as file:
        assert file.alignment == alignment
        for key, (_, value) in metadata.items():
            assert plain(file.metadata[key]) == value
        assert list(file.tensors) == list(tensors)
        for name, (element, shape, raw) in tensors.items():
            tensor = file.tensors[name]
            assert (tensor.type, tensor.shape) == (element, shape)
            assert file.data(tensor).tobytes() == raw
    if n_parts == 1:
        agree(paths[0])
    assert [t[0] for path in paths for t in gguf_oracle.tensors(path)] == list(tensors)


# Values and tensors


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (1, "u32"),
        (-1, "i32"),
        (2**32, "u64"),
        (-(2**32), "i64"),
        (0.5, "f32"),
        (True, "bool"),
        ("x", "str"),
        (np.float64(0.5), "f64"),
        (np.uint8(5), "u8"),
        ([1, 2], "array of 2 i32"),
        ([1, 2**31], "array of 2 i64"),
        ([1, 2**63], "array of 2 u64"),
        ([1, 0.5], "array of 2 f32"),
        ((True, False), "array of 2 bool"),
        (["x", ""], "array of 2 str"),
        ([np.int64(1)], "array of 1 i32"),
        (np.zeros(3, np.uint16), "array of 3 u16"),
        (np.zeros(0, bool), "array of 0 bool"),
    ],
)
def test_a_value_without_a_type_gets_the_usual_one(value: object, label: str, tmp_path: Path) -> None:
    writer = GgufWriter()
    writer.set("k", value)
    with GgufFile.open(*writer.write(tmp_path / "a.gguf")) as file:
        assert file.value_types["k"] == label


@pytest.mark.parametrize(
    "values",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(24, dtype=">f4").reshape(4, 6),
        np.arange(24, dtype=np.float16).reshape(4, 6).T,
        np.arange(24, dtype=np.int32)[::2],
        np.array(1.5, np.float64),
    ],
    ids=["3-d", "big-endian", "transposed", "strided", "scalar"],
)
def test_an_array_is_stored_row_by_row(values: NDArray[Any], tmp_path: Path) -> None:
    writer = GgufWriter()
    writer.add_tensor("w", values)
    with GgufFile.open(*writer.write(tmp_path / "a.gguf")) as file:
        tensor = file.tensors["w"]
        assert tensor.shape == values.shape[::-1]
        stored = file.data(tensor).view(values.dtype.newbyteorder("<")).reshape(values.shape)
        assert np.array_equal(stored, values)


def test_metadata_of_a_file_can_be_taken_over(tmp_path: Path) -> None:
    writer = GgufWriter()
    with GgufFile.open(MODELS / "qwen35-tiny-Q8_0.gguf") as source:
        writer.copy_metadata(source, without={"general.name"})
        with GgufFile.open(*writer.write(tmp_path / "a.gguf")) as copy:
            assert dict(copy.value_types) == {
                k: v for k, v in source.value_types.items() if k != "general.name"
            }
            for key, value in copy.metadata.items():
                assert plain(value) == plain(source.metadata[key])


# Streaming and replacing

CHUNK_BYTES = 1 << 16


def chunks(n: int) -> Iterator[bytes]:
    for i in range(n):
        yield bytes([i % 251]) * CHUNK_BYTES


def test_a_streamed_tensor_is_never_held_whole(tmp_path: Path) -> None:
    n = 256
    writer = GgufWriter()
    writer.add_raw("w", chunks(n), shape=(CHUNK_BYTES, n), element=ElementType.I8)
    tracemalloc.start()
    try:
        (path,) = writer.write(tmp_path / "a.gguf")
        assert tracemalloc.get_traced_memory()[1] < n * CHUNK_BYTES / 16
    finally:
        tracemalloc.stop()
    with GgufFile.open(path) as file:
        stored = file.data(file.tensors["w"]).reshape(n, CHUNK_BYTES)
        assert (stored == np.arange(n, dtype=np.uint8)[:, None] % 251).all()


def failing() -> Iterator[bytes]:
    yield bytes(8)
    raise RuntimeError("source broke")


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (lambda: chunks(1), UsageError, r"has 131072 bytes; 65536 were given"),
        (lambda: chunks(3), UsageError, r"has 131072 bytes; 196608 or more were given"),
        (failing, RuntimeError, "source broke"),
    ],
    ids=["short", "long", "broken"],
)
@pytest.mark.parametrize("n_parts", [1, 2])
def test_a_failed_write_leaves_the_old_files_and_nothing_else(
    source: Callable[[], Iterator[bytes]], error: type[Exception], words: str, n_parts: int, tmp_path: Path
) -> None:
    old = part_names(tmp_path / "a.gguf", n_parts)
    for path in old:
        path.write_text("old")
    writer = GgufWriter()
    writer.add_tensor("v", np.zeros(4, np.float32))
    writer.add_raw("w", source(), shape=(CHUNK_BYTES, 2), element=ElementType.I8)
    with pytest.raises(error, match=words):
        writer.write(tmp_path / "a.gguf", n_parts=n_parts)
    assert sorted(tmp_path.iterdir()) == sorted(old)
    assert all(path.read_text() == "old" for path in old)


def test_a_mapped_file_may_be_replaced(tmp_path: Path) -> None:
    def write(value: float) -> Path:
        writer = GgufWriter()
        writer.add_tensor("w", np.full(2000, value, np.float32))
        return writer.write(tmp_path / "a.gguf")[0]

    with GgufFile.open(write(1)) as before, GgufFile.open(write(2)) as after:
        assert [set(f.data(f.tensors["w"]).view("<f4").tolist()) for f in (before, after)] == [{1.0}, {2.0}]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no/a\.gguf cannot be written"):
        GgufWriter().write(tmp_path / "no" / "a.gguf")


def test_a_name_that_cannot_be_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"xxx cannot be written: .*too long"):
        GgufWriter().write(tmp_path / ("x" * 300))
    assert not list(tmp_path.iterdir())


# What is refused


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        ("", 1, None, "1 to 65535 bytes"),
        ("a\0", 1, None, "no NUL"),
        ("k" * 65_536, 1, None, "1 to 65535 bytes"),
        ("\ud800", 1, None, "UTF-8"),
        ("general.alignment", 32, None, "by the writer itself"),
        ("split.no", 0, None, "by the writer itself"),
        ("k", "\ud800", None, "UTF-8"),
        ("k", 256, ValueType.U8, "'256' does not fit u8"),
        ("k", -1, ValueType.U32, "'-1' does not fit u32"),
        ("k", 0.5, ValueType.I32, "'0.5' does not fit i32"),
        ("k", 1e300, ValueType.F32, "does not fit f32"),
        ("k", 1, ValueType.BOOL, "'1' does not fit bool"),
        ("k", 1, ValueType.STR, "'1' does not fit str"),
        ("k", ["a", 1], ValueType.STR, "does not fit str"),
        ("k", 1, ValueType.ARRAY, "does not fit array"),
        ("k", 2**64, None, "no type suits"),
        ("k", [], None, r"no type suits '\[\]'"),
        ("k", ["a", 1], None, "no type suits"),
        ("k", [True, 1], None, "no type suits"),
        ("k", None, None, "no type suits"),
        ("k", [[1], [2]], None, "no type suits"),
        ("k", np.zeros((2, 2)), None, "2 dimensions"),
    ],
)
def test_metadata_that_cannot_be_stored_is_refused(
    key: str, value: object, kind: ValueType | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        GgufWriter().set(key, value, kind)


def test_tensors_that_cannot_be_stored_are_refused() -> None:
    writer = GgufWriter()
    with pytest.raises(UsageError, match="no element type for NumPy's uint8; use add_raw"):
        writer.add_tensor("w", np.zeros(4, np.uint8))
    with pytest.raises(UsageError, match="1 to 63 bytes"):
        writer.add_tensor("w" * 64, np.zeros(4, np.float32))
    with pytest.raises(UsageError, match=r"shape \[4, 0\]"):
        writer.add_tensor("w", np.zeros((0, 4), np.float32))
    with pytest.raises(UsageError, match="sizes from 1 on"):
        writer.add_tensor("w", np.zeros((1, 1, 1, 1, 1), np.float32))
    with pytest.raises(UsageError, match="48 elements"):
        writer.add_raw("w", bytes(27), shape=(48,), element=ElementType.Q4_0)
    with pytest.raises(UsageError, match=r"shape \[32, 2\] and type q4_0 has 36 bytes; 35 were given"):
        writer.add_raw("w", bytes(35), shape=(32, 2), element=ElementType.Q4_0)


def test_names_are_taken_once() -> None:
    writer = GgufWriter()
    writer.set("k", 1)
    writer.add_tensor("w", np.zeros(4, np.float32))
    with pytest.raises(UsageError, match="'k' is there already"):
        writer.set("k", 1)
    with pytest.raises(UsageError, match="'w' is there already"):
        writer.add_tensor("w", np.zeros(4, np.float32))


@pytest.mark.parametrize("alignment", [0, 4, 48, 1 << 32])
def test_an_alignment_that_no_reader_takes_is_refused(alignment: int) -> None:
    with pytest.raises(UsageError, match=f"alignment {alignment} must be a power of two"):
        GgufWriter(alignment=alignment)


@pytest.mark.parametrize("n_parts", [0, 3])
def test_a_set_has_at_least_one_tensor_per_part(n_parts: int, tmp_path: Path) -> None:
    writer = GgufWriter()
    writer.add_tensor("v", np.zeros(4, np.float32))
    writer.add_tensor("w", np.zeros(4, np.float32))
    with pytest.raises(UsageError, match=rf"{n_parts} parts.*up to one per tensor \(2\)"):
        writer.write(tmp_path / "a.gguf", n_parts=n_parts)
