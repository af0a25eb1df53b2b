"""What to build, and how the build speaks. Imported by build.py; knows nothing of the package.

Also the pin of ggml's source package, read from ggml.toml.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BACKENDS = ("cpu", "cuda", "hip", "vulkan")


class BuildError(Exception):
    """The build cannot go on: one message with the reason and what helps."""


def say(text: str) -> None:
    print(f"pyggml_dflash: {text}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The source package that carries ggml, as ggml.toml names it."""

    package: str
    version: str
    sha256: str
    folder: str  # of ggml inside the package
    ggml: str  # its version
    licence: str


def read_pin(path: Path) -> Pin:
    """The pin in `path`. Python 3.10 has no TOML reader, so the file keeps to lines of `key = "value"`."""
    values = {}
    for line in path.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r'(\w+) = "([^"]*)"', line)
            if match is None:
                raise BuildError(f'{path}: {line!r} is not of the form key = "value"')
            values[match[1]] = match[2]
    return Pin(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to build. Made from the environment and, as a script, from arguments, which win."""

    backend: str
    jobs: int
    cmake_args: tuple[str, ...]
    ggml_source: Path | None  # folder or archive that replaces the pinned package
    cache: Path


def read_options(env: Mapping[str, str], argv: Sequence[str] = ()) -> Options:
    """Options from `env` and `argv`; raises BuildError for a value that nothing can be made of."""
    asked, cores, names = env.get("PYGGML_DFLASH_BACKEND") or "cpu", os.cpu_count() or 1, ", ".join(BACKENDS)
    parser = argparse.ArgumentParser(prog="build.py", description="Build ggml and the cffi module in place.")
    parser.add_argument("--backend", default=asked, help=f"hardware to build for: {names} (%(default)s)")
    parser.add_argument("--jobs", type=int, default=cores, help="files compiled at a time (%(default)s)")
    args = parser.parse_args(argv)
    if args.backend not in BACKENDS:
        raise BuildError(f"back end {args.backend!r} is unknown; PYGGML_DFLASH_BACKEND takes {names}")
    if args.jobs < 1:
        raise BuildError(f"--jobs {args.jobs}: at least 1 is needed")
    cmake_args = tuple(shlex.split(env.get("CMAKE_ARGS", "")))
    for arg in cmake_args:
        if re.match(r"-DGGML_(CUDA|HIP|VULKAN)(:\w+)?=", arg):
            raise BuildError(f"CMAKE_ARGS has {arg}; the hardware is chosen with PYGGML_DFLASH_BACKEND alone")
    source = env.get("DFLASH_GGML_SOURCE")
    home = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Options(
        backend=args.backend,
        jobs=args.jobs,
        cmake_args=cmake_args,
        ggml_source=Path(source).expanduser().resolve() if source else None,
        cache=home / "pyggml_dflash",
    )
