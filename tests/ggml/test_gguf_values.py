"""Typed access to metadata: what widens, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.ggml.gguf import GgufFile, Strings
from pyggml_dflash.ggml.gguf_values import ValueType
from pyggml_dflash.ggml.gguf_writer import GgufWriter


def value_file(folder: Path, values: dict[str, Any], kinds: dict[str, ValueType] | None = None) -> GgufFile:
    writer = GgufWriter()
    for key, value in values.items():
        writer.set(key, value, (kinds or {}).get(key))
    return GgufFile.open(*writer.write(folder / "values.gguf"))


@pytest.mark.parametrize(
    "kind", [k for k in ValueType if k.code and k not in (ValueType.F32, ValueType.F64, ValueType.BOOL)]
)
def test_an_integer_of_any_width_is_an_int(kind: ValueType, tmp_path: Path) -> None:
    most = np.iinfo(kind.dtype).max
    with value_file(tmp_path, {"one": most, "many": [0, most]}, {"one": kind, "many": kind}) as file:
        assert file.get_int("one") == most
        assert file.get_ints("many") == [0, most]
        assert file.value_types["one"] == kind.label
        assert file.value_types["many"] == f"array of 2 {kind.label}"


def test_getters_widen_where_nothing_is_lost(tmp_path: Path) -> None:
    with value_file(tmp_path, {"i": 1, "f": 0.5, "b": True, "bits": [0, 1], "ints": [3, 4]}) as file:
        assert file.get_float("i") == 1.0
        assert file.get_float("f") == 0.5
        assert file.get_bool("b") is file.get_bool("i") is True
        assert file.get_bools("bits") == [False, True]
        assert file.get_floats("ints") == [3.0, 4.0]
        assert all(type(v) is float for v in file.get_floats("ints"))


def test_one_value_stands_for_every_layer_when_a_length_is_asked_for(tmp_path: Path) -> None:
    with value_file(tmp_path, {"one": 8, "each": [8, 4, 8]}) as file:
        assert file.get_ints("one", n=3) == [8, 8, 8]
        assert file.get_ints("each", n=3) == [8, 4, 8]
        with pytest.raises(
            DamagedFileError, match="'each' is array of 3 i32; an array of 2 integers is needed"
        ):
            file.get_ints("each", n=2)
        with pytest.raises(DamagedFileError, match="'one' is u32 '8'; an array of integers is needed"):
            file.get_ints("one")


@pytest.mark.parametrize(
    ("getter", "key", "words"),
    [
        ("get_int", "f", "'f' is f32 '0.5'; an integer is needed"),
        ("get_int", "b", "'b' is bool 'True'; an integer is needed"),
        ("get_float", "s", "'s' is str 'text'; a number is needed"),
        ("get_bool", "two", "'two' is u32 '2'; a bool is needed"),
        ("get_str", "two", "'two' is u32 '2'; a string is needed"),
        ("get_str", "strs", "'strs' is array of 1 str; a string is needed"),
        ("get_ints", "strs", "'strs' is array of 1 str; an array of integers is needed"),
        ("get_ints", "floats", "'floats' is array of 2 f32; an array of integers is needed"),
        ("get_bools", "ints", "'ints' is array of 2 i32; an array of bools is needed"),
        ("get_strs", "s", "'s' is str 'text'; an array of strings is needed"),
    ],
)
def test_a_value_of_another_kind_names_key_found_and_wanted(
    getter: str, key: str, words: str, tmp_path: Path
) -> None:
    values = {"f": 0.5, "b": True, "s": "text", "two": 2, "strs": ["x"], "floats": [0.5, 1.5], "ints": [0, 2]}
    with value_file(tmp_path, values) as file, pytest.raises(DamagedFileError) as caught:
        getattr(file, getter)(key)
    assert words in str(caught.value)
    assert str(file.path) in str(caught.value)


def test_an_absent_key_gives_the_default_or_names_itself(tmp_path: Path) -> None:
    with value_file(tmp_path, {"a": 1}) as file:
        assert file.get_int("b", None) is None
        assert file.get_ints("b", [1, 2]) == [1, 2]
        with pytest.raises(
            UnsupportedModelError, match=r"values\.gguf: the metadata key 'b' \(a string\) is missing"
        ):
            file.get_str("b")


def test_an_array_of_strings_is_a_sequence(tmp_path: Path) -> None:
    words = ["", "é", "日本", "x" * 300]
    with value_file(tmp_path, {"words": words}) as file:
        value = file.metadata["words"]
    assert isinstance(value, Strings)
    assert list(value) == words
    assert [value[i] for i in range(4)] == words
    assert (value[-1], value[1:3], len(value), "é" in value) == (words[-1], words[1:3], 4, True)
    with pytest.raises(IndexError):
        value[4]


def test_numbers_are_arrays_of_the_width_in_the_file(tmp_path: Path) -> None:
    with value_file(tmp_path, {"a": np.array([1, 2, 3], np.uint16)}) as file:
        value = file.metadata["a"]
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.uint16
    assert not value.flags.writeable


def test_value_types_are_numbered_as_in_ggml() -> None:
    for kind in ValueType:
        assert kind.label.startswith(c_string(lib.gguf_type_name(kind)))
    assert max(ValueType) == lib.GGUF_TYPE_COUNT - 1
