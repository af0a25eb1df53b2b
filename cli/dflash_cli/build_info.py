"""What the native build wrote about itself, read as a file, since the build may be broken. Layer 9."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyggml_dflash


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """One native build; `files` are sizes in bytes by path below the native package."""

    backend: str
    ggml: str  # the package or folder that its source is from
    cmake_args: tuple[str, ...]
    files: dict[str, int]


def native_folder() -> Path:
    """Where the built module and its libraries are, or should be."""
    return Path(pyggml_dflash.__file__).parent / "ggml"


def read_build(folder: Path | None = None) -> BuildInfo | None:
    """The build of the imported package, or of another folder; None if there is none, or not a whole one."""
    try:
        found = json.loads(((folder or native_folder()) / "lib" / "build.json").read_text(encoding="utf-8"))
        return BuildInfo(
            backend=found["backend"],
            ggml=found["ggml"],
            cmake_args=tuple(found["cmake_args"]),
            files=dict(found["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
