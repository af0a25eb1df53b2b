"""GGUF model files: a checked, read-only view of metadata, tensor table and tensor bytes. Layer 1.

`GgufFile` is a whole model, one file or all parts of a split set (NAME-00001-of-00003.gguf and so on).
ggml's own reader is not used: it takes some bad files and allocates before it has checked others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyggml_dflash.errors import DamagedFileError, ModelFileError
from pyggml_dflash.ggml.gguf_part import Part, TensorInfo
from pyggml_dflash.ggml.gguf_values import MetaValue, Strings, quote
from pyggml_dflash.ggml.tensor_file import TensorFile

__all__ = ["GgufFile", "MetaValue", "Strings", "TensorInfo"]

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GgufFile(TensorFile):
    """One model file, or all parts of a split one, mapped for reading."""

    parts: tuple[Path, ...]
    version: int
    alignment: int  # the smallest of the parts': every tensor's offset is a multiple of it
    n_bytes: int  # of all part files
    tensors: Mapping[str, TensorInfo]  # in file order

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        tensors = {t.name: t for part in parts for t in part.tensors}
        super().__init__(
            path, parts[0].metadata, parts[0].value_types, tensors, [part.data for part in parts]
        )
        self.parts = tuple(part.path for part in parts)
        self.version = parts[0].version
        self.alignment = min(part.alignment for part in parts)
        self.n_bytes = sum(len(part.data) for part in parts)

    @classmethod
    def open(cls, path: Path | str) -> GgufFile:
        """Map and check `path`. Any part of a split set opens the whole set, found by its names.

        The metadata is the first part's. ModelFileError: no such file, not readable, a part is missing.
        DamagedFileError: not GGUF, cut short, contradictory. UnsupportedModelError: another version or
        byte order, an element type that ggml does not have.
        """
        path = Path(path)
        opened = Part(path)
        if opened.split_count <= 1:
            return cls(path, [opened])
        paths = _part_paths(opened)
        parts = [opened if i == opened.index else Part(p) for i, p in enumerate(paths)]
        _check_set(parts)
        return cls(path, parts)

    def __enter__(self) -> GgufFile:
        return self

    def __repr__(self) -> str:
        return f"GgufFile({str(self.path)!r}, {len(self.tensors)} tensors, {self.n_bytes} bytes)"


def _part_paths(opened: Part) -> list[Path]:
    """The names of all parts of the set, which `opened` must carry one of; all of them exist."""
    path, count, no = opened.path, opened.split_count, opened.index + 1
    match = _PART_NAME.fullmatch(path.name)
    if match is None or (int(match["no"]), int(match["count"])) != (no, count) or not 1 <= no <= count:
        raise DamagedFileError(
            f"{path}: by its metadata this is part {no} of {count}, so its name must end in "
            f"-{no:05d}-of-{count:05d}.gguf, or the other parts cannot be found"
        )
    paths = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        present = [p.name for p in paths if p.name not in missing]
        raise ModelFileError(
            f"{path.parent}: {len(missing)} of {count} parts missing: {_some(missing)}; "
            f"there: {_some(present)}"
        )
    return paths


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_set(parts: Sequence[Part]) -> None:
    """The parts agree on the set, stand in its order and come from one model."""
    first, n_tensors = parts[0], sum(len(part.tensors) for part in parts)
    declared = first.get_int("split.tensors.count", n_tensors)
    for i, part in enumerate(parts):
        if part.split_count != len(parts) or part.index != i:
            raise DamagedFileError(
                f"{part.path}: by its metadata this is part {part.index + 1} of {part.split_count}, "
                f"by its name part {i + 1} of {len(parts)}; it was renamed, or copied from another set"
            )
        _check_same_model(first, part)
    if n_tensors != declared:
        raise DamagedFileError(
            f"{first.path}: the parts have {n_tensors} tensors, split.tensors.count is {declared}"
        )
    seen: dict[str, Part] = {}
    for part in parts:
        for t in part.tensors:
            if t.name in seen:
                raise DamagedFileError(
                    f"tensor {quote(t.name)} is both in {seen[t.name].path} and in {part.path.name}"
                )
            seen[t.name] = part


def _check_same_model(first: Part, part: Part) -> None:
    """Later parts usually repeat none of the model's keys, but all of the set's."""
    for key in ("general.architecture", "general.name"):
        _check_equal(first, part, key, first.get_str(key, None), part.get_str(key, None))
    key = "split.tensors.count"
    _check_equal(first, part, key, first.get_int(key, None), part.get_int(key, None))


def _check_equal(first: Part, part: Part, key: str, ours: object, theirs: object) -> None:
    if ours is not None and theirs is not None and ours != theirs:
        raise DamagedFileError(
            f"{part.path} belongs to another model than {first.path.name}: {key} is {theirs}, not {ours}"
        )
