"""What `dflash doctor` checks of an installation: package, build, requirements, PATH, environment. Layer 9.

Each check takes what it looks at as an argument and returns findings, so that a test can show it any case.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from dflash_cli.build_info import BuildInfo

Status = Literal["ok", "warn", "fail"]

BACKEND_VARIABLE: Final = "PYGGML_DFLASH_BACKEND"
OTHER_NAMES: Final = "use 'pyggml-dflash' or 'python -m pyggml_dflash', which do the same"
BUILD_AGAIN: Final = "install the package again with pip, or run 'python build.py' in a source checkout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding; `remedy` says what to do about a warning or a failure."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def check_python() -> Check:
    """Which Python runs this."""
    return Check(name="python", status="ok", detail=f"{platform.python_version()} ({sys.executable})")


def check_package(version: str, used: Path, search_path: Sequence[str]) -> Check:
    """Whether the imported package, in folder `used`, is the only one, and a built one."""
    folders = [Path(entry or ".").resolve() / "pyggml_dflash" for entry in search_path]
    others = [folder for folder in dict.fromkeys(folders) if _is_package(folder) and folder != used.resolve()]
    detail = f"pyggml_dflash {version} in {used}"
    built = [str(folder) for folder in others if is_built(folder)]
    if not is_built(used):
        hides = f"; it hides the built one in {built[0]}" if built else ""
        remedy = "start Python in another folder, or run 'python build.py' here" if built else BUILD_AGAIN
        return Check(
            name="package", status="fail", detail=f"{detail} has no built module{hides}", remedy=remedy
        )
    if others:
        names = ", ".join(map(str, others))
        remedy = "remove one of them, or start Python in another folder"
        return Check(name="package", status="warn", detail=f"{detail} hides {names}", remedy=remedy)
    return Check(name="package", status="ok", detail=detail)


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").exists()


def is_built(package: Path) -> bool:
    """True if the folder of a package has the compiled module."""
    return any((package / "ggml").glob("_ggml*.so")) or any((package / "ggml").glob("_ggml*.pyd"))


def check_requirements(versions: Mapping[str, str | None]) -> Check:
    """Whether every package that this one needs is installed."""
    missing = [name for name, version in versions.items() if version is None]
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        return Check(
            name="requirements", status="fail", detail=f"missing: {', '.join(missing)}", remedy=remedy
        )
    return Check(name="requirements", status="ok", detail=present)


def check_build(build: BuildInfo | None, folder: Path) -> Check:
    """Whether the native files in `folder` are those that the build made."""
    if build is None:
        return Check(
            name="build", status="fail", detail=f"no record of a build in {folder}", remedy=BUILD_AGAIN
        )
    wrong = [name for name, size in build.files.items() if _size(folder / name) != size]
    if wrong:
        detail = f"missing or changed since the build: {', '.join(wrong)}"
        return Check(name="build", status="fail", detail=detail, remedy=BUILD_AGAIN)
    detail = f"{build.backend}, ggml of {build.ggml} {' '.join(build.cmake_args)}"
    return Check(name="build", status="ok", detail=detail.rstrip())


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def check_variable(build: BuildInfo | None, environment: Mapping[str, str]) -> Check:
    """Whether the back end asked for in the environment is the one that was built."""
    asked = environment.get(BACKEND_VARIABLE)
    if not asked or build is None:
        return Check(name="environment", status="ok", detail=f"{BACKEND_VARIABLE} is {asked or 'not set'}")
    if asked == build.backend:
        return Check(name="environment", status="ok", detail=f"{BACKEND_VARIABLE} is {asked}, as built")
    return Check(
        name="environment",
        status="warn",
        detail=f"{BACKEND_VARIABLE} is {asked}, but this build is for {build.backend}",
        remedy="the variable is read when the package is built: install it again with the variable set",
    )


def check_command(search_path: str, python: str) -> Check:
    """Which `dflash` a shell with this PATH runs: ours, another package's, or another environment's."""
    found = [path for folder in search_path.split(os.pathsep) if (path := _command_in(folder)) is not None]
    if not found:
        return Check(name="command", status="warn", detail="no 'dflash' on PATH", remedy=OTHER_NAMES)
    first = found[0]
    script = _head(first)
    if b"dflash_cli" not in script:
        ours = next((path for path in found if b"dflash_cli" in _head(path)), None)
        hidden = "" if ours is None else f", in front of {ours}"
        detail = f"{first} is first on PATH{hidden} and belongs to another package"
        return Check(name="command", status="warn", detail=detail, remedy=OTHER_NAMES)
    interpreter = script.split(b"\n", 1)[0].removeprefix(b"#!").decode(errors="replace").strip()
    if "python" in Path(interpreter).name and Path(interpreter).parent != Path(python).parent:
        detail = f"{first} is first on PATH and runs with {interpreter}, another Python than this one"
        remedy = "activate the environment that is meant, or put it first on PATH"
        return Check(name="command", status="warn", detail=detail, remedy=remedy)
    return Check(name="command", status="ok", detail=f"{first} is first on PATH and is this package's")


def _command_in(folder: str) -> Path | None:
    for name in ("dflash", "dflash.exe") if os.name == "nt" else ("dflash",):
        path = Path(folder or ".") / name
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def _head(path: Path) -> bytes:
    """The beginning of a script, or all of a small launcher; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""
