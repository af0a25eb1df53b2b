"""A model as it is published for Hugging Face: a folder with config.json and *.safetensors files. Layer 2.

The safetensors package opens each file and checks its header: tensors follow each other without gaps up to
the end of the file, so their order and sizes say where each one lies. Their bytes stay mapped.
"""

from __future__ import annotations

import json
import math
import mmap
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from pyggml_dflash.errors import DamagedFileError, ModelFileError, UnsupportedModelError
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_part import MAX_DIMS
from pyggml_dflash.ggml.gguf_values import REQUIRED, quote

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
MAX_JSON_BYTES: Final = 2**24  # an index of some 100,000 tensors; configurations have a few KiB
MAX_COUNT: Final = 2**31 - 2
ELEMENTS: Final = {name: ElementType[name] for name in ("F32", "F16", "BF16")}

T = TypeVar("T")
D = TypeVar("D")


class JsonConfig:
    """Values of a config.json by name, their types checked; what is `null` counts as absent.

    A name is looked up in one object after the other. Without a default an absent one is an
    UnsupportedModelError; a value of another kind or out of range is a DamagedFileError.
    """

    def __init__(self, path: Path, *scopes: Mapping[str, object]) -> None:
        self.path, self.scopes = path, scopes

    @classmethod
    def read(cls, folder: Path) -> JsonConfig:
        """The config.json of a folder."""
        return cls(folder / CONFIG, read_json(folder / CONFIG))

    def get(self, name: str) -> object:
        """The value as it is, or None."""
        return next((s[name] for s in self.scopes if s.get(name) is not None), None)

    def nested(self, name: str) -> JsonConfig:
        """A view that looks into the object called `name` first, if there is one."""
        inner = self.section(name)
        return self if inner is None else JsonConfig(self.path, inner, *self.scopes)

    def section(self, name: str) -> Mapping[str, object] | None:
        """The object called `name`, or None."""
        return self._typed(name, None, "an object", lambda v: v if isinstance(v, dict) else None)

    def integer(self, name: str, default: D = REQUIRED, *, low: int = 1, high: int = MAX_COUNT) -> int | D:
        """A whole number within [low, high]."""
        wanted = f"a whole number from {low} to {high}"
        return self._typed(name, default, wanted, lambda v: _as_int(v, low, high))

    def number(self, name: str, default: D = REQUIRED) -> float | D:
        """A number that single precision can hold, rounded to it."""
        return self._typed(name, default, "a number below 3e38", _as_single)

    def flag(self, name: str, default: D = REQUIRED) -> bool | D:
        """True or false."""
        return self._typed(name, default, "true or false", lambda v: v if isinstance(v, bool) else None)

    def text(self, name: str, default: D = REQUIRED) -> str | D:
        """A string."""
        return self._typed(name, default, "a string", lambda v: v if isinstance(v, str) else None)

    def integers(self, name: str, default: D = REQUIRED) -> list[int] | D:
        """A list of whole numbers from 0 on."""
        wanted = f"a list of whole numbers from 0 to {MAX_COUNT}"
        return self._typed(name, default, wanted, lambda v: _each(v, lambda x: _as_int(x, 0, MAX_COUNT)))

    def texts(self, name: str, default: D = REQUIRED) -> list[str] | D:
        """A list of strings."""
        return self._typed(
            name,
            default,
            "a list of strings",
            lambda v: _each(v, lambda x: x if isinstance(x, str) else None),
        )

    def unsupported(self, text: str) -> UnsupportedModelError:
        """An error about a value that is sound but not handled."""
        return UnsupportedModelError(f"{self.path}: {text}")

    def _typed(self, name: str, default: D, wanted: str, convert: Callable[[object], T | None]) -> T | D:
        value = self.get(name)
        if value is None:
            if default is REQUIRED:
                raise self.unsupported(f"'{name}' is missing; it must be {wanted}")
            return default
        converted = convert(value)
        if converted is None:
            raise DamagedFileError(f"{self.path}: '{name}' is {_shown(value)}; it must be {wanted}")
        return converted


def _as_int(value: object, low: int, high: int) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and low <= value <= high else None  # type: ignore[operator,return-value]


def _as_single(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(np.float32(value)) if is_number and abs(value) < 3e38 else None  # type: ignore[arg-type]


def _each(value: object, convert: Callable[[object], T | None]) -> list[T] | None:
    if not isinstance(value, list):
        return None
    converted = [v for v in map(convert, value) if v is not None]
    return converted if len(converted) == len(value) else None


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(path: Path) -> dict[str, object]:
    """The object that a JSON file holds."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening, which waits for a writer of a pipe
            raise ModelFileError(f"{path} is not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist; a published model has it beside its weights") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_JSON_BYTES:
        raise UnsupportedModelError(f"{path} has more than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path} holds no JSON object")
    return value


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are; `shape` as in the file, slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    element: ElementType
    part: int  # index of the file that holds it
    offset: int  # bytes from the start of that file

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.element.block_bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder: its configuration, its tensors by name, and its files, mapped."""

    path: Path
    config: JsonConfig
    tensors: Mapping[str, StoredTensor]
    maps: tuple[mmap.mmap, ...]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Map and check every file; ModelFileError, or a kind of it, says what is wrong with which."""
        config = JsonConfig.read(path)
        tensors: dict[str, StoredTensor] = {}
        files, maps = weight_files(path), []
        for part, file in enumerate(files):
            maps.append(_map(file))
            for tensor in _read_table(file, len(maps[-1]), part):
                if tensor.name in tensors:
                    other = files[tensors[tensor.name].part].name
                    raise DamagedFileError(f"tensor {quote(tensor.name)} is both in {other} and in {file}")
                tensors[tensor.name] = tensor
        return cls(path, config, tensors, tuple(maps))

    def data(self, tensor: StoredTensor) -> memoryview:
        """The tensor's bytes, a view of the mapping."""
        return memoryview(self.maps[tensor.part])[tensor.offset : tensor.offset + tensor.n_bytes]


def weight_files(folder: Path) -> list[Path]:
    """The *.safetensors files of a folder: those of the index, if there is one."""
    if not (folder / INDEX).exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{folder} has no *.safetensors file")
        return files
    weight_map = read_json(folder / INDEX).get("weight_map")
    values = list(weight_map.values()) if isinstance(weight_map, dict) else []
    names = sorted({name for name in values if isinstance(name, str) and Path(name).name == name})
    if not names or any(name not in names for name in values):
        raise DamagedFileError(f"{folder / INDEX}: 'weight_map' must say which file has which tensor")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelFileError(
            f"{folder}: {len(missing)} of {len(names)} files missing: {', '.join(missing[:4])}"
        )
    return [folder / name for name in names]


def _map(path: Path) -> mmap.mmap:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening, which waits for a writer of a pipe
            raise ModelFileError(f"{path} is not a regular file, so it cannot be mapped")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    if data[:4] == b"vers":
        raise DamagedFileError(f"{path}: this is a Git LFS pointer, not the file itself: run `git lfs pull`")
    return data


def _read_table(path: Path, n_bytes: int, part: int) -> list[StoredTensor]:
    """The tensors of a file in the order in which they lie; the last one ends where the file does."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices: list[tuple[str, Any]] = [(name, file.get_slice(name)) for name in file.offset_keys()]
            rows = [(name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices]
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path} is no sound safetensors file: {error}") from None
    tensors = [StoredTensor(name, shape, _element(path, name, dtype), part, 0) for name, dtype, shape in rows]
    for tensor in tensors:
        if 0 in tensor.shape or len(tensor.shape) > MAX_DIMS:
            raise UnsupportedModelError(
                f"{path}: tensor {quote(tensor.name)} has the shape {list(tensor.shape)}; "
                f"1 to {MAX_DIMS} sizes from 1 on are supported"
            )
    return _placed(tensors, n_bytes)


def _element(path: Path, name: str, dtype: str) -> ElementType:
    if dtype not in ELEMENTS:
        raise UnsupportedModelError(
            f"{path}: tensor {quote(name)} has the type {dtype}; supported are {', '.join(ELEMENTS)}"
        )
    return ELEMENTS[dtype]


def _placed(tensors: Sequence[StoredTensor], n_bytes: int) -> list[StoredTensor]:
    offset = n_bytes - sum(t.n_bytes for t in tensors)
    placed = []
    for t in tensors:
        placed.append(StoredTensor(t.name, t.shape, t.element, t.part, offset))
        offset += t.n_bytes
    return placed
