"""Builds the native part: pinned ggml, the files of vendor/, and the cffi module over both.

One code for three callers: hatchling (`pip install .`, a wheel, an sdist), `pip install -e .`, and
`python build.py`. In order: read the options, find the tools, fetch ggml, emit C from vendor/cdef, run
CMake and Ninja, put the result in place. Sources and objects live in a cache folder of the user, one per
configuration; the package gets its files by rename at the very end.

Do not run the `build` front end from this folder: this file has its name. `pip wheel .` does the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # hatchling and the tests load this file by its path, without its folder

from vendor.fetch import Source, file_sha256, find_source, locked, tree_digest  # noqa: E402
from vendor.options import BuildError, Options, read_options, read_pin, say  # noqa: E402
from vendor.toolchain import Toolchain, cannot_build, find_toolchain, python_includes  # noqa: E402

del sys.path[0]

if TYPE_CHECKING:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    Hook = BuildHookInterface[Any]
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface as Hook
    except ImportError:  # run as a script, which needs no hatchling
        Hook = object

VENDOR = ROOT / "vendor"
TREE = ROOT / "pyggml_dflash" / "ggml"
NATIVE = ("CMakeLists.txt", "module.c", "cdef", "overlay")  # of vendor/, what CMake and cffi read
CDEFS = ("ggml", "ggml-backend", "ggml-alloc", "ggml-cpu", "ggml-rpc", "gguf", "overlay", "module")
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
INFO = "lib/build.json"

# Compile work in seconds of one core: the CPU's with GCC 12 on x86-64, CUDA's for one architecture on 16
# cores. Nobody measured the other two.
WORK_S = {"cpu": 70, "cuda": 3300, "hip": None, "vulkan": None}


def build(options: Options) -> Path:
    """A folder with `_ggml<suffix>` and lib/, complete and up to date. It stays in the cache."""
    tools = find_toolchain(options)
    source = find_source(read_pin(VENDOR / "ggml.toml"), options.ggml_source, options.cache)
    config = [str(source.ggml), options.backend, *options.cmake_args, *tools.cmake_args, tools.identity]
    folder = options.cache / f"build-{options.backend}-{text_key(*config)}"
    key = text_key(*config, source.digest, native_digest(), SUFFIX)
    out = folder / f"out{SUFFIX}"
    with locked(options.cache / f"{folder.name}.lock"):
        if not is_complete(out, key):
            announce(options, source)
            run_cmake(options, tools, source, folder)
            stage(options, tools, source, folder, out, key)
    return out


def text_key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def native_digest() -> str:
    """Digest of everything of ours that the result depends on."""
    paths = [VENDOR / name for name in NATIVE] + [ROOT / "build.py"]
    return text_key(*(tree_digest(path) if path.is_dir() else file_sha256(path) for path in paths))


def is_complete(out: Path, key: str) -> bool:
    """Whether `out` is the result of `key`, with every file of it in its full size."""
    with contextlib.suppress(OSError, ValueError):
        info = json.loads((out / INFO).read_text())
        return info["key"] == key and all((out / n).stat().st_size == s for n, s in info["files"].items())
    return False


def announce(options: Options, source: Source) -> None:
    work = WORK_S[options.backend]
    estimate = "time unknown"
    if work is not None:
        seconds = work / options.jobs
        estimate = f"about {round(seconds / 60)} min" if seconds > 90 else f"about {round(seconds, -1):.0f} s"
    what = " ".join([options.backend, *options.cmake_args])
    say(f"building ggml from {source.origin} for {what}; {options.jobs} jobs, {estimate} from scratch")


def emit_module(target: Path) -> None:
    """The C source of `_ggml`, from vendor/cdef and vendor/module.c."""
    import cffi

    texts = [(VENDOR / "cdef" / f"{name}.h").read_text("utf-8") for name in CDEFS]
    builder = cffi.FFI()
    builder.cdef("\n".join(texts))
    preamble = [(VENDOR / "module.c").read_text("utf-8"), *(prototypes(text) for text in texts)]
    builder.set_source("pyggml_dflash.ggml._ggml", "\n".join(preamble))
    with contextlib.redirect_stdout(None):  # cffi prints the name of the file
        builder.emit_c_code(str(target))


def prototypes(cdef: str) -> str:
    """The functions of a cdef as C, to stand after the real headers.

    cffi's wrappers alone would compile where the type of a number is wrong, and cut its value; declared
    twice, a difference is an error.
    """
    text = re.sub(r"/\*.*?\*/|^#.*?$", "", cdef, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\{.*?\}", "{}", text, flags=re.DOTALL)
    statements = (" ".join(part.split()) for part in text.split(";"))
    return "\n".join(f"{s};" for s in statements if "(" in s and not re.match(r"typedef|extern", s))


def run_cmake(options: Options, tools: Toolchain, source: Source, folder: Path) -> None:
    """Configures and compiles in `folder`. A failed configuration leaves no folder behind."""
    for name in NATIVE:
        sync(VENDOR / name, folder / "vendor" / name)
    module_c = folder / "_ggml.c"
    emit_module(module_c)
    values = {
        "CMAKE_MAKE_PROGRAM": tools.ninja,
        "DFLASH_GGML": str(source.ggml),
        "DFLASH_GGML_ORIGIN": source.origin,
        "DFLASH_BACKEND": options.backend,
        "DFLASH_MODULE_C": str(module_c),
        "DFLASH_MODULE_SUFFIX": SUFFIX,
        "DFLASH_PYTHON_INCLUDE": ";".join(python_includes()),
    }
    command = [tools.cmake, "-S", str(folder / "vendor"), "-B", str(folder / "cmake"), "-G", "Ninja"]
    command += [f"-D{name}={value}" for name, value in values.items()]
    command += [*tools.cmake_args, *options.cmake_args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        errors = done.stderr[max(done.stderr.find("CMake Error"), 0) :].strip()[:3000]
        raise cannot_build(
            options.backend, f"CMake stops with\n{errors}\n", "a part of the toolkit is missing or too old"
        )
    compile_all([tools.ninja, "-C", str(folder / "cmake"), "-j", str(options.jobs), "module"], folder)


def sync(source: Path, target: Path) -> None:
    """Makes `target` a copy of `source` and leaves equal files alone, so that Ninja sees true changes."""
    if source.is_file():
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        return
    names = {path.name for path in source.iterdir()}
    for name in names:
        sync(source / name, target / name)
    for path in target.iterdir():
        if path.name not in names:
            path.unlink()


def compile_all(command: Sequence[str], folder: Path) -> None:
    """Runs Ninja and shows its progress: one line that moves on a terminal, else one per tenth."""
    started, shown, lines = time.monotonic(), -1, list[str]()
    env = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    pipe, join = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, stdout=pipe, stderr=join, text=True, env=env) as ninja:
        assert ninja.stdout is not None
        for line in ninja.stdout:
            lines.append(line)
            if step := re.match(r"\[(\d+)/(\d+)\] .*?([^/ ]+)$", line.strip()):
                shown = show_progress(int(step[1]), int(step[2]), step[3], time.monotonic() - started, shown)
    if sys.stdout.isatty() and shown >= 0:
        print()
    if ninja.returncode:
        log = folder / "ninja.log"
        log.write_text("".join(lines))
        failed = [i for i, line in enumerate(lines) if line.startswith("FAILED")]
        first = failed[0] if failed else max(0, len(lines) - 30)
        shown_lines = "".join(lines[first : first + 30]).strip()
        raise BuildError(f"compiling failed; {log} has all of it\n{shown_lines[:4000]}")


def show_progress(done: int, total: int, name: str, seconds: float, shown: int) -> int:
    """Prints a step; returns the tenth of the work that was printed last."""
    line = f"{100 * done // total:4d}%  {done}/{total}  {seconds:.0f} s  {name.removesuffix('.o')}"
    tenth = 10 * done // total
    if sys.stdout.isatty():
        print(f"\r{line[:78]:78}", end="", flush=True)
    elif tenth != shown:
        print(line, flush=True)
    return tenth


def stage(options: Options, tools: Toolchain, source: Source, folder: Path, out: Path, key: str) -> None:
    """Gathers what was built in `out`, which appears whole or not at all."""
    fresh = folder / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [tools.cmake, "--install", str(folder / "cmake"), "--component", "dflash"]
    done = subprocess.run([*command, "--prefix", str(fresh)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"gathering the libraries failed: {done.stderr.strip()[:2000]}")
    if not list((fresh / "lib").glob(f"*ggml-{options.backend}-dflash.*")):
        raise cannot_build(options.backend, "CMake made no library for it", "look at CMAKE_ARGS")
    shutil.copyfile(source.licence, fresh / "lib" / "LICENSE.ggml")
    paths = [path for path in sorted(fresh.rglob("*")) if path.is_file()]
    info = {
        "key": key,
        "backend": options.backend,
        "ggml": source.origin,
        "cmake_args": list(options.cmake_args),
        "files": {path.relative_to(fresh).as_posix(): path.stat().st_size for path in paths},
    }
    (fresh / INFO).write_text(json.dumps(info, indent=1) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    fresh.replace(out)


def build_into_tree(options: Options, tree: Path = TREE) -> bool:
    """Builds and puts the files into the source tree; false when they were there already."""
    out = build(options)
    if is_complete(tree, json.loads((out / INFO).read_text())["key"]):
        return False
    with tempfile.TemporaryDirectory(dir=tree, prefix=".new-") as temporary:
        fresh = Path(temporary) / "out"
        shutil.copytree(out, fresh)
        # A module of another Python does not fit the new lib/, so all go.
        for old in [*tree.glob("_ggml*.so"), tree / "lib"]:
            if old.exists():
                old.replace(Path(temporary) / old.name)
        (fresh / "lib").replace(tree / "lib")
        (fresh / f"_ggml{SUFFIX}").replace(tree / f"_ggml{SUFFIX}")
    return True


class NativeBuildHook(Hook):
    """hatchling's side: a wheel takes the files from the cache, an editable install from the tree.

    A source package takes nothing: it is built where it is installed.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "sdist":
            return
        try:
            options = read_options(os.environ)
            if version == "editable":
                build_into_tree(options)
            else:
                build_data["force_include"].update(wheel_files(build(options)))
        except BuildError as error:
            sys.exit(f"pyggml_dflash: {error}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def wheel_files(out: Path) -> dict[str, str]:
    """Built files and their places in a wheel."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {str(path): f"pyggml_dflash/ggml/{path.relative_to(out).as_posix()}" for path in files}


def main(argv: Sequence[str]) -> int:
    try:
        changed = build_into_tree(read_options(os.environ, argv))
    except BuildError as error:
        print(f"pyggml_dflash: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\npyggml_dflash: stopped; the next run goes on where this one was", file=sys.stderr)
        return 130
    say(f"{TREE} {'has the new build' if changed else 'is up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
