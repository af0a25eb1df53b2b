"""The build: what it refuses, what it leaves behind, and that a second run does nothing.

Nothing here compiles ggml or reaches a network. A few lines of C stand for ggml; pip is real, over a
folder that serves as its index.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "llama_cpp_python-0.3.36"

BACKEND = """
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    import pathlib
    info = pathlib.Path(folder, "llama_cpp_python-0.3.36.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 0.3.36\\n")
    return info.name
"""
GGML = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.14...3.28)
        project(ggml C)
        foreach(name ggml-base ggml-cpu ggml)
            add_library(${name} SHARED src/ggml.c)
            target_include_directories(${name} PUBLIC include)
        endforeach()
    """,
    "include/ggml.h": "int ggml_answer(void);\n",
    "include/ggml-backend.h": "#include <stdbool.h>\n#include <stddef.h>\n"
    "typedef struct ggml_backend * ggml_backend_t;\n",
    "src/ggml.c": '#include "ggml.h"\nint ggml_answer(void) { return 42; }\n',
}
MODULE = """
    #define PY_SSIZE_T_CLEAN
    #include <Python.h>
    #include "ggml.h"
    static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ggml", NULL, -1};
    PyMODINIT_FUNC PyInit__ggml(void) {
        PyObject *module = PyModule_Create(&definition);
        PyModule_AddIntConstant(module, "answer", ggml_answer());
        return module;
    }
"""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """build.py as a module, loaded the way hatchling does."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_package(folder: Path) -> Path:
    """A source package in the shape of the pinned one, unpacked: ggml deep inside, its licence above it."""
    write_files(folder / "vendor/llama.cpp/ggml", GGML)
    write_files(folder / "vendor/llama.cpp", {"LICENSE": "MIT\n", "other.c": "not ggml\n"})
    return write_files(
        folder,
        {
            "pyproject.toml": "[build-system]\nrequires = []\n"
            'build-backend = "backend"\nbackend-path = ["."]\n',
            "backend.py": BACKEND,
            "PKG-INFO": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n",
        },
    )


def pack(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, f"w:{archive.suffix.removeprefix('.')}") as tar:
        tar.add(folder, folder.name)
    return archive


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = write_package(tmp_path / PACKAGE)
    (tmp_path / "index").mkdir()
    return pack(folder, tmp_path / "index" / f"{PACKAGE}.tar.gz")


@pytest.fixture
def pin(build: ModuleType, package: Path) -> Any:
    """The real pin with the hash of the stand-in package."""
    real = build.read_pin(ROOT / "vendor/ggml.toml")
    return dataclasses.replace(real, sha256=hashlib.sha256(package.read_bytes()).hexdigest())


@pytest.fixture
def pip_index(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees one folder and nothing else."""
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(package.parent),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CACHE_DIR": str(tmp_path / "pip"),
    }.items():
        monkeypatch.setenv(name, value)
    return package.parent


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


# -- ggml's sources


def test_the_pinned_package_is_fetched_once_and_only_ggml_is_kept(
    build: ModuleType, pin: Any, pip_index: Path, tmp_path: Path
) -> None:
    first = build.find_source(pin, None, tmp_path / "cache")
    next(pip_index.iterdir()).unlink()
    assert build.find_source(pin, None, tmp_path / "cache") == first
    kept = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert kept >= {"ggml.c", "ggml.h", "LICENSE"}
    assert not kept & {"other.c", "backend.py", "PKG-INFO"}


def test_a_damaged_cache_is_noticed_and_made_again(
    build: ModuleType, pin: Any, pip_index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = build.find_source(pin, None, tmp_path / "cache")
    (source.ggml / "src/ggml.c").write_text("int ggml_answer(void) { return 41; }\n")
    assert build.find_source(pin, None, tmp_path / "cache") == source
    assert (source.ggml / "src/ggml.c").read_text() == GGML["src/ggml.c"]
    assert "is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["another package", "cut short"])
def test_a_package_of_another_hash_is_not_used(
    build: ModuleType, pin: Any, pip_index: Path, tmp_path: Path, change: str
) -> None:
    archive = next(pip_index.iterdir())
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2] if change == "cut short" else content + b"\0")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(build.BuildError, match=f"{found}.*{pin.sha256}.*pip cache purge"):
        build.find_source(pin, None, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_without_an_index_the_message_names_the_way_out(
    build: ModuleType, pin: Any, pip_index: Path, tmp_path: Path
) -> None:
    next(pip_index.iterdir()).unlink()
    with pytest.raises(build.BuildError, match=r"cannot fetch llama-cpp-python 0\.3\.36.*DFLASH_GGML_SOURCE"):
        build.find_source(pin, None, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize("form", ["package", "package/vendor/llama.cpp", "package/vendor/llama.cpp/ggml"])
def test_a_folder_serves_in_place_of_the_index(
    build: ModuleType, pin: Any, tmp_path: Path, form: str
) -> None:
    write_package(tmp_path / "package")
    source = build.find_source(pin, tmp_path / form, tmp_path / "cache")
    assert (source.ggml / "src/ggml.c").is_file()
    assert source.licence.read_text() == "MIT\n"


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz"])
def test_an_archive_serves_in_place_of_the_index(
    build: ModuleType, pin: Any, tmp_path: Path, suffix: str
) -> None:
    write_package(tmp_path / "package")
    archive = pack(tmp_path / "package/vendor/llama.cpp", tmp_path / f"sources{suffix}")
    source = build.find_source(pin, archive, tmp_path / "cache")
    assert (source.ggml / "src/ggml.c").is_file()
    assert source.licence.read_text() == "MIT\n"


@pytest.mark.parametrize("where", ["absent", "empty"])
def test_a_source_without_ggml_is_refused_by_name(
    build: ModuleType, pin: Any, tmp_path: Path, where: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(build.BuildError, match=rf"DFLASH_GGML_SOURCE=.*{where}.*it takes ggml's folder"):
        build.find_source(pin, tmp_path / where, tmp_path / "cache")


def test_ggml_without_its_licence_is_refused(build: ModuleType, pin: Any, tmp_path: Path) -> None:
    write_files(tmp_path / "alone/ggml", GGML)
    with pytest.raises(build.BuildError, match="no LICENSE"):
        build.find_source(pin, tmp_path / "alone/ggml", tmp_path / "cache")


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.xz"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_an_archive_cut_short_is_refused_and_leaves_nothing(
    build: ModuleType, pin: Any, tmp_path: Path, suffix: str, share: float
) -> None:
    package = write_package(tmp_path / "package")
    (package / "vendor/llama.cpp/ggml/noise").write_bytes(os.urandom(100_000))  # so that a cut hits data
    archive = pack(package, tmp_path / f"cut{suffix}")
    archive.write_bytes(archive.read_bytes()[: int(archive.stat().st_size * share)])
    with pytest.raises(build.BuildError, match="is cut short or damaged"):
        build.find_source(pin, archive, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def link(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (tarfile.TarInfo("p/ggml/../../../escaped"), "leads out of its folder"),
        (tarfile.TarInfo("/escaped"), "leads out of its folder"),
        (tarfile.TarInfo("p\\..\\..\\escaped"), "leads out of its folder"),
        (link("p/ggml/src/linked.c"), "is a link or a device"),
    ],
    ids=["parent", "absolute", "backslash", "link"],
)
def test_an_archive_that_reaches_out_of_its_folder_is_refused(
    build: ModuleType, pin: Any, tmp_path: Path, member: tarfile.TarInfo, reason: str
) -> None:
    write_files(tmp_path / "p/ggml", {**GGML, "LICENSE": "MIT\n"})
    archive = pack(tmp_path / "p", tmp_path / "plain.tar.gz")
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as bad, tarfile.open(archive) as plain:
        for good in plain:
            bad.addfile(good, plain.extractfile(good))
        bad.addfile(member, io.BytesIO())
    with pytest.raises(build.BuildError, match=reason):
        build.find_source(pin, tmp_path / "bad.tar.gz", tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []
    assert not list(tmp_path.rglob("escaped"))


# -- options and tools


@pytest.mark.parametrize(
    ("env", "argv", "message"),
    [
        ({"PYGGML_DFLASH_BACKEND": "gpu"}, [], "'gpu' is unknown.*cpu, cuda, hip, vulkan"),
        ({}, ["--backend", "CUDA"], "'CUDA' is unknown"),
        ({}, ["--jobs", "0"], "--jobs 0"),
        ({"CMAKE_ARGS": "-DGGML_CUDA=ON"}, [], "PYGGML_DFLASH_BACKEND alone"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(
    build: ModuleType, env: dict[str, str], argv: list[str], message: str
) -> None:
    with pytest.raises(build.BuildError, match=message):
        build.read_options({"HOME": "/nowhere", **env}, argv)


def run_script(tmp_path: Path, *, tools: tuple[str, ...], env: dict[str, str]) -> tuple[int, str]:
    """Exit code and standard error of build.py where PATH has `tools` alone; checks that nothing was left."""
    path = tmp_path / "bin"
    path.mkdir()
    for name in tools:
        found = shutil.which(name)
        assert found is not None
        (path / name).symlink_to(found)
    built = ROOT / "pyggml_dflash/ggml"
    before = {file: file.stat().st_mtime_ns for file in [*built.glob("_ggml*.so"), *built.glob("lib/*")]}
    nowhere = {name: str(tmp_path / "nowhere") for name in ("CUDA_PATH", "ROCM_PATH", "VULKAN_SDK")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "build.py")],
        env={"PATH": str(path), "XDG_CACHE_HOME": str(tmp_path / "cache"), **nowhere, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert not (tmp_path / "cache").exists()
    return done.returncode, done.stderr


def test_a_missing_compiler_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    code, message = run_script(tmp_path, tools=(), env={})
    assert code == 1
    assert message.startswith("pyggml_dflash: no C++ compiler: cc, gcc, clang not found; install one")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("backend", "reason", "remedy"),
    [
        ("cuda", "the CUDA compiler nvcc not found", "CUDA toolkit"),
        ("hip", "hipcc not found", "ROCm"),
        ("vulkan", "glslc not found", "Vulkan SDK"),
    ],
)
def test_a_back_end_without_its_toolkit_fails_and_nothing_else_is_built(
    tmp_path: Path, backend: str, reason: str, remedy: str
) -> None:
    code, message = run_script(tmp_path, tools=("cc", "c++"), env={"PYGGML_DFLASH_BACKEND": backend})
    assert code == 1
    assert message.startswith(f"pyggml_dflash: cannot build the {backend} back end: ")
    assert reason in message
    assert remedy in message
    assert message.count("\n") == 1


def test_cuda_without_a_card_asks_for_the_architecture(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    compiler = shutil.which("c++")
    assert compiler is not None
    for name in ("cc", "c++"):
        (tmp_path / name).symlink_to(compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.delenv("CUDAARCHS", raising=False)
    env = {"PYGGML_DFLASH_BACKEND": "cuda", "HOME": str(tmp_path)}
    with pytest.raises(build.BuildError, match=r"no NVIDIA GPU.*CMAKE_CUDA_ARCHITECTURES"):
        build.find_toolchain(build.read_options(env))
    named = build.read_options({**env, "CMAKE_ARGS": "-DCMAKE_CUDA_ARCHITECTURES=90"})
    assert build.find_toolchain(named).cmake_args == (f"-DCMAKE_CUDA_COMPILER={nvcc}",)


# -- the module's declarations


def test_a_declaration_with_the_wrong_type_of_number_does_not_compile(
    build: ModuleType, tmp_path: Path
) -> None:
    """cffi's own check lets an int stand for an int64_t, which would cut the value."""
    header = "#include <stdint.h>\nint64_t ggml_blck_size(int type);\n"

    def compiles(cdef: str) -> bool:
        source = tmp_path / "check.c"
        source.write_text(header + build.prototypes(cdef))
        cc = shutil.which("cc")
        assert cc is not None
        return subprocess.run([cc, "-fsyntax-only", str(source)], capture_output=True).returncode == 0

    assert compiles("/* a comment; with f(x) */\n#define N ...\nint64_t ggml_blck_size(int type);")
    assert not compiles("int ggml_blck_size(int type);")


def test_every_function_of_the_cdefs_is_checked_against_the_headers(build: ModuleType) -> None:
    import cffi

    texts = [(ROOT / f"vendor/cdef/{name}.h").read_text() for name in build.CDEFS]
    declarations = cffi.FFI()
    declarations.cdef("\n".join(texts))
    functions = [key.split()[1] for key in declarations._parser._declarations if key.startswith("function ")]
    repeated = "\n".join(build.prototypes(text) for text in texts)
    assert len(functions) > 300
    assert [name for name in functions if f"{name}(" not in repeated] == []


# -- a whole build, of a few lines of C


@pytest.fixture
def small(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Path]]:
    """Options for a build of the stand-in ggml, which has no RPC, and an empty tree to put it into."""
    monkeypatch.setattr(build, "emit_module", lambda target: target.write_text(MODULE))
    source = write_files(tmp_path / "small", {**GGML, "LICENSE": "MIT\n"})
    (tmp_path / "tree").mkdir()

    def options(**env: str) -> tuple[Any, Path]:
        env |= {"DFLASH_GGML_SOURCE": str(source), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return build.read_options({"CMAKE_ARGS": "-DGGML_RPC=OFF", **env}), tmp_path / "tree"

    return options


def test_a_build_is_complete_and_a_second_run_does_nothing(
    build: ModuleType, small: Callable[..., tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, tree = small()
    assert build.build_into_tree(options, tree)
    names = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    libraries = {f"lib/lib{name}-dflash.so" for name in ("ggml", "ggml-base", "ggml-cpu")}
    assert names == libraries | {f"_ggml{build.SUFFIX}", "lib/build.json", "lib/LICENSE.ggml"}
    assert set(build.wheel_files(build.build(options)).values()) == {f"pyggml_dflash/ggml/{n}" for n in names}
    run = subprocess.run(
        [sys.executable, "-c", "import _ggml; print(_ggml.answer)"],
        env={"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "42\n"

    monkeypatch.setattr(build, "run_cmake", None)  # a call would raise
    assert not build.build_into_tree(options, tree)
    (tree / "lib/libggml-dflash.so").unlink()
    assert build.build_into_tree(options, tree)  # from the cache, without CMake
    assert (tree / "lib/libggml-dflash.so").is_file()


def test_a_failed_compile_says_why_and_keeps_the_build_that_was_there(
    build: ModuleType, small: Callable[..., tuple[Any, Path]]
) -> None:
    options, tree = small()
    write_files(tree, {"lib/libold.so": "old", f"_ggml{build.SUFFIX}": "old"})
    (options.ggml_source / "src/ggml.c").write_text("#error this cannot compile\n")
    with pytest.raises(build.BuildError, match=r"compiling failed; .*ninja\.log(.|\n)*this cannot compile"):
        build.build_into_tree(options, tree)
    assert sorted(path.name for path in tree.rglob("*")) == sorted(
        ["lib", "libold.so", f"_ggml{build.SUFFIX}"]
    )


def test_a_ggml_that_stops_in_cmake_is_quoted_and_leaves_no_build_folder(
    build: ModuleType, small: Callable[..., tuple[Any, Path]]
) -> None:
    options, tree = small()
    (options.ggml_source / "CMakeLists.txt").write_text('message(FATAL_ERROR "toolkit too old")\n')
    with pytest.raises(build.BuildError, match=r"cannot build the cpu back end: (.|\n)*toolkit too old"):
        build.build_into_tree(options, tree)
    assert left_in(options.cache) == []
    assert list(tree.iterdir()) == []
