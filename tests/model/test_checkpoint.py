"""A published folder is read as it lies on disk; a bad one is refused with the fault named."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError
from pyggml_dflash.model.checkpoint import INDEX, Checkpoint, JsonConfig
from tests.drafts.published import Stored, header_of, safetensors_bytes, write_safetensors

TENSORS: Stored = {
    "a.weight": ("F32", np.arange(12, dtype="<f4").reshape(3, 4)),
    "b.weight": ("F16", np.arange(5, dtype="<f2")),
    "c.weight": ("BF16", np.arange(8, dtype="<u2").reshape(2, 2, 2)),
    "d": ("F32", np.array(7, "<f4")),
}


def make(folder: Path, tensors: Stored = TENSORS, config: object = None) -> Path:
    """A folder with a configuration and one file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"x": 1}))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def check_bytes(checkpoint: Checkpoint) -> None:
    for name, (dtype, values) in TENSORS.items():
        stored = checkpoint.tensors[name]
        assert (stored.element.name, stored.shape) == (dtype, values.shape)
        assert bytes(checkpoint.data(stored)) == values.tobytes()


def test_tensors_are_the_bytes_that_the_file_has(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make(tmp_path))
    assert {*checkpoint.tensors} == {*TENSORS}
    check_bytes(checkpoint)


@pytest.mark.parametrize("indexed", [True, False])
def test_tensors_may_be_spread_over_files(tmp_path: Path, indexed: bool) -> None:
    make(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for i, (name, tensor) in enumerate(TENSORS.items()):
        write_safetensors(tmp_path / f"part-{i}.safetensors", {name: tensor})
    if indexed:
        weight_map = {name: f"part-{i}.safetensors" for i, name in enumerate(TENSORS)}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        write_safetensors(tmp_path / "consolidated.safetensors", TENSORS)  # not in the index
    check_bytes(Checkpoint.open(tmp_path))


def packed(header: Any, data: bytes | None = None) -> bytes:
    whole = b"".join(values.tobytes() for _, values in TENSORS.values())
    return safetensors_bytes(header, whole if data is None else data)


def changed(name: str, key: str, value: object) -> bytes:
    header = header_of(TENSORS)
    header[name][key] = value
    return packed(header)


GOOD = packed(header_of(TENSORS))
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "a-few-bytes": (b"abc", "no sound safetensors file"),
    "header-longer-than-the-file": (struct.pack("<Q", 10**6) + b"{}", "no sound safetensors file"),
    "huge-header": (struct.pack("<Q", 2**63) + GOOD[8:], "no sound safetensors file"),
    "header-of-all-ones": (struct.pack("<Q", 2**64 - 1) + GOOD[8:], "no sound safetensors file"),
    "header-is-no-json": (struct.pack("<Q", 8) + b"not json", "no sound safetensors file"),
    "header-is-a-list": (packed([1, 2]), "no sound safetensors file"),
    "one-byte-short": (GOOD[:-1], "no sound safetensors file"),
    "cut-in-the-middle": (GOOD[: len(GOOD) - 40], "no sound safetensors file"),
    "cut-in-the-header": (GOOD[:40], "no sound safetensors file"),
    "one-byte-more": (GOOD + b"\0", "no sound safetensors file"),
    "unknown-type": (changed("b.weight", "dtype", "F7"), "no sound safetensors file"),
    "type-that-nothing-computes-with": (changed("b.weight", "dtype", "I16"), "'b.weight' has the type I16"),
    "shape-of-other-size": (changed("b.weight", "shape", [6]), "no sound safetensors file"),
    "shape-that-overflows": (changed("b.weight", "shape", [2**62, 2**62]), "no sound safetensors file"),
    "negative-shape": (changed("b.weight", "shape", [-5]), "no sound safetensors file"),
    "offsets-backwards": (changed("b.weight", "data_offsets", [58, 48]), "no sound safetensors file"),
    "offsets-beyond-the-end": (changed("b.weight", "data_offsets", [480, 490]), "no sound safetensors file"),
    "offsets-overlap": (changed("b.weight", "data_offsets", [40, 50]), "no sound safetensors file"),
    "lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "a-gguf-file": (b"GGUF" + bytes(60), "no sound safetensors file"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_not_sound_is_refused(tmp_path: Path, case: str) -> None:
    data, reason = BAD_FILES[case]
    make(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        Checkpoint.open(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1, 1, 1, 1, 1)])
def test_a_shape_that_no_tensor_can_have_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    make(tmp_path, {"odd": ("F32", np.zeros(shape, "<f4"))})
    with pytest.raises(UnsupportedModelError, match=r"tensor 'odd' has the shape"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    write_safetensors(tmp_path / "other.safetensors", {"d": TENSORS["d"]})
    with pytest.raises(
        DamagedFileError, match=r"'d' is both in model.safetensors and in .*other.safetensors"
    ):
        Checkpoint.open(tmp_path)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


INDEXED = '{"weight_map": {"a.weight": "model.safetensors", "b.weight": "gone.safetensors"}}'
BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-config": (remove("config.json"), "config.json does not exist"),
    "config-is-no-json": (write("config.json", "{'x': 1}"), "config.json is not valid JSON"),
    "config-is-a-list": (write("config.json", "[1]"), "config.json holds no JSON object"),
    "config-is-deep": (write("config.json", "[" * 100_000), "config.json is not valid JSON"),
    "config-has-a-giant-number": (write("config.json", '{"x": 1' + "0" * 5000 + "}"), "not valid JSON"),
    "config-is-huge": (write("config.json", " " * (2**24 + 1)), "more than 16777216 bytes"),
    "no-weights": (remove("model.safetensors"), "has no *.safetensors file"),
    "part-missing": (write(INDEX, INDEXED), "1 of 2 files missing: gone.safetensors"),
    "index-without-a-map": (write(INDEX, "{}"), "'weight_map' must say which file has which tensor"),
    "index-with-numbers": (write(INDEX, '{"weight_map": {"a": [1]}}'), "'weight_map' must say"),
    "index-that-leaves-the-folder": (write(INDEX, '{"weight_map": {"a": "../m"}}'), "'weight_map' must say"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_with_something_missing_or_wrong_is_refused(tmp_path: Path, case: str) -> None:
    change, reason = BAD_FOLDERS[case]
    change(make(tmp_path))
    with pytest.raises(ModelFileError) as caught:
        Checkpoint.open(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path, name: str) -> None:
    make(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelFileError, match="not a regular file"):
        Checkpoint.open(tmp_path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_a_changed_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = make(tmp_path_factory.mktemp("folder"))
    end = 8 + struct.unpack("<Q", GOOD[:8])[0]
    at, value = data.draw(st.integers(0, end - 1)), data.draw(st.integers(0, 255))
    whole = bytearray((folder / "model.safetensors").read_bytes())
    whole[at] = value
    (folder / "model.safetensors").write_bytes(whole)
    try:
        checkpoint = Checkpoint.open(folder)
    except ModelFileError:
        return
    for tensor in checkpoint.tensors.values():
        assert len(checkpoint.data(tensor)) == tensor.n_bytes


VALUES = {
    "count": 3,
    "scale": 1e-6,
    "big": 1e39,
    "yes": True,
    "name": "x",
    "ids": [1, 5],
    "names": ["a"],
    "mixed": [1, "a"],
    "inner": {"count": 4, "name": None},
    "nothing": None,
}


def test_values_are_looked_up_in_the_inner_object_first() -> None:
    config = JsonConfig(Path("config.json"), VALUES).nested("inner")
    assert (config.integer("count"), config.text("name"), config.integers("ids")) == (4, "x", [1, 5])
    assert JsonConfig(Path("config.json"), VALUES).nested("nothing").integer("count") == 3


def test_numbers_are_rounded_as_a_gguf_file_rounds_them() -> None:
    assert JsonConfig(Path("config.json"), VALUES).number("scale") == float(np.float32(1e-6))


READERS: dict[str, tuple[Callable[[JsonConfig], object], str]] = {
    "missing": (lambda c: c.integer("gone"), "'gone' is missing; it must be a whole number from 1"),
    "null": (lambda c: c.number("nothing"), "'nothing' is missing; it must be a number"),
    "bool-for-int": (lambda c: c.integer("yes"), "'yes' is true; it must be a whole number"),
    "float-for-int": (lambda c: c.integer("scale"), "'scale' is 1e-06; it must be a whole number"),
    "too-small": (lambda c: c.integer("count", low=4), "'count' is 3; it must be a whole number from 4"),
    "text-for-number": (lambda c: c.number("name"), "'name' is \"x\"; it must be a number"),
    "number-beyond-single": (lambda c: c.number("big"), "'big' is 1e+39; it must be a number below 3e38"),
    "int-for-bool": (lambda c: c.flag("count"), "'count' is 3; it must be true or false"),
    "list-for-text": (lambda c: c.text("ids"), "'ids' is [1, 5]; it must be a string"),
    "mixed-list": (lambda c: c.integers("mixed"), "it must be a list of whole numbers"),
    "ints-for-texts": (lambda c: c.texts("ids"), "it must be a list of strings"),
    "number-for-object": (lambda c: c.nested("count"), "'count' is 3; it must be an object"),
}


@pytest.mark.parametrize("case", READERS)
def test_a_value_of_another_kind_is_refused_by_its_name(case: str) -> None:
    read, reason = READERS[case]
    with pytest.raises(ModelFileError) as caught:
        read(JsonConfig(Path("a/config.json"), VALUES))
    assert reason in str(caught.value)
    assert "a/config.json" in str(caught.value)
