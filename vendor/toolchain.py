"""Compilers and build tools: finds them, or says what to install. Imported by build.py.

Everything is looked for before anything is fetched or compiled, so a miss costs no time and leaves
nothing behind. A back end whose compiler is missing is an error, never a build of another one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vendor.options import BuildError, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What compiles this build, and a text that differs where its objects would."""

    cmake: str
    ninja: str
    cmake_args: tuple[str, ...]  # that name the back end's compiler
    identity: str


def find_toolchain(options: Options) -> Toolchain:
    """Every tool of the build; raises BuildError naming the first that is missing."""
    if sys.platform == "win32":
        raise BuildError("Windows is not supported; build inside WSL 2")
    find_compiler("CC", ("cc", "gcc", "clang"))
    compiler = find_compiler("CXX", ("c++", "g++", "clang++"))
    cmake_args = backend_args(options)
    python_includes()
    return Toolchain(
        cmake=find_tool("cmake", "CMAKE_BIN_DIR"),
        ninja=find_tool("ninja", "BIN_DIR"),
        cmake_args=cmake_args,
        identity=identity(compiler),
    )


def find_tool(name: str, folder: str) -> str:
    """cmake or ninja: of the Python package, which has its folder in `folder`, else the system's."""
    with contextlib.suppress(ImportError):
        path = Path(getattr(importlib.import_module(name), folder)) / name
        if path.is_file():
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is missing; run `{sys.executable} -m pip install cmake ninja cffi`")
    return found


def find_compiler(variable: str, names: Sequence[str]) -> str:
    """The compiler that `variable` names, else the first of `names`."""
    asked = os.environ.get(variable)
    for name in [asked.split()[0]] if asked else names:
        if path := shutil.which(name):
            return path
    tried = f"{variable}={asked}" if asked else ", ".join(names)
    raise BuildError(
        f"no C++ compiler: {tried} not found; install one (Debian, Ubuntu: apt install g++; Fedora: "
        "dnf install gcc-c++; macOS: xcode-select --install) or point CC and CXX to it"
    )


def python_includes() -> list[str]:
    """Folders with Python.h of the running interpreter."""
    folders = sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"Python.h of {sys.executable} is missing; install its headers "
            f"(Debian, Ubuntu: apt install python{version}-dev; Fedora: dnf install python3-devel)"
        )
    return folders


def backend_args(options: Options) -> tuple[str, ...]:
    """CMake arguments that name the back end's compiler; raises where the back end cannot be built."""
    if options.backend == "cuda":
        return cuda_args(options.cmake_args)
    if options.backend == "hip" and find_program("hipcc", "ROCM_PATH", "/opt/rocm") is None:
        raise cannot_build("hip", "hipcc not found", "install ROCm 6.1 or newer, or set ROCM_PATH")
    if options.backend == "vulkan" and find_program("glslc", "VULKAN_SDK", "/usr") is None:
        remedy = "install the Vulkan SDK (Debian, Ubuntu: apt install libvulkan-dev glslc spirv-headers)"
        raise cannot_build("vulkan", "the shader compiler glslc not found", remedy)
    return ()


def cuda_args(cmake_args: Sequence[str]) -> tuple[str, ...]:
    nvcc = os.environ.get("CUDACXX") or find_program("nvcc", "CUDA_PATH", "/usr/local/cuda")
    if nvcc is None or shutil.which(nvcc) is None:
        remedy = "install NVIDIA's CUDA toolkit, or set CUDACXX to its nvcc or CUDA_PATH to its folder"
        raise cannot_build("cuda", f"the CUDA compiler {nvcc or 'nvcc'} not found", remedy)
    named = any(re.match(r"-D(CMAKE_CUDA_ARCHITECTURES|GGML_NATIVE)\b", arg) for arg in cmake_args)
    if not named and "CUDAARCHS" not in os.environ and not has_nvidia_gpu():
        remedy = 'name the card\'s architecture, as in CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=90"'
        raise cannot_build("cuda", "no NVIDIA GPU to compile for answers nvidia-smi", remedy)
    return (f"-DCMAKE_CUDA_COMPILER={nvcc}",)


def cannot_build(backend: str, what: str, remedy: str) -> BuildError:
    return BuildError(f"cannot build the {backend} back end: {what}; {remedy}. Nothing was built instead")


def find_program(name: str, variable: str, home: str) -> str | None:
    folder = os.environ.get(variable) or home
    return shutil.which(name) or shutil.which(name, path=f"{folder}/bin")


def has_nvidia_gpu() -> bool:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
        return done.returncode == 0 and "GPU" in done.stdout
    return False


def identity(compiler: str) -> str:
    """Compiler, flags and CPU. The CPU counts because the cache may lie on a disk that machines share."""
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    with contextlib.suppress(OSError):
        cpu = re.search(r"^(flags|Features)\b.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        text += cpu[0] if cpu else ""
    names = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAARCHS", "SOURCE_DATE_EPOCH")
    return "\0".join([platform.machine(), text, *(os.environ.get(name, "") for name in names)])
