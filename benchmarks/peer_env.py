"""An interpreter that has the peer: llama-cpp-python of the release that our ggml comes from.

It is built from the source package that vendor/ggml.toml pins, by pip, into a virtual environment in the
user's cache folder, once per set of build arguments; what fails half-way is removed.

On x86-64 machines with AMX the peer is built without: this ggml runs AMX tile instructions on threads that
have not loaded a tile configuration, and the process ends with the first prompt (llama.cpp issue 20824).
Ours does not use ggml's AMX layout either, so both sides multiply with the same kernels.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vendor.fetch import download, locked  # noqa: E402
from vendor.options import read_options, read_pin, say  # noqa: E402

NO_AMX: Final = "-mno-amx-int8"
BUILD_ARGS: Final = {
    "cpu": (),
    "cuda": ("-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF"),
}
CHECK: Final = "import llama_cpp; print(llama_cpp.__version__)"


def build_arguments(backend: str, env: Mapping[str, str]) -> list[str]:
    """CMake arguments of the peer: what this machine needs, then the caller's CMAKE_ARGS."""
    arguments = ["-DLLAVA_BUILD=OFF", *BUILD_ARGS[backend]]
    if cpu_has("amx_int8"):
        arguments += [f"-DCMAKE_C_FLAGS={NO_AMX}", f"-DCMAKE_CXX_FLAGS={NO_AMX}"]
    return arguments + shlex.split(env.get("CMAKE_ARGS", ""))


def cpu_has(flag: str) -> bool:
    """Whether Linux lists a CPU feature; False elsewhere."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return False
    lines = [line for line in info.read_text().splitlines() if line.startswith("flags")]
    return bool(lines) and flag in lines[0].split()


def peer_python(backend: str, env: Mapping[str, str], jobs: int) -> Path:
    """The interpreter of the peer's environment, which is built if it is not there yet (minutes)."""
    pin, options = read_pin(ROOT / "vendor" / "ggml.toml"), read_options({**env, "CMAKE_ARGS": ""})
    arguments = build_arguments(backend, env)
    tag = f"{sys.version_info.major}{sys.version_info.minor}"
    home = options.cache / f"peer-{pin.version}-py{tag}-{_key(arguments)}"
    with locked(options.cache / f"{home.name}.lock"):
        if not _works(home / "bin" / "python"):
            say(f"building {pin.package} {pin.version} with {' '.join(arguments)}; {jobs} jobs, minutes")
            shutil.rmtree(home, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=options.cache, prefix="peer-sdist-") as folder:
                archive = download(pin, Path(folder))
                _make(home, archive, {**env, "CMAKE_ARGS": shlex.join(arguments)}, jobs)
    return home / "bin" / "python"


def _key(arguments: list[str]) -> str:
    return hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:12]


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", CHECK], capture_output=True, check=False).returncode == 0


def _make(home: Path, archive: Path, env: Mapping[str, str], jobs: int) -> None:
    """A virtual environment in `home` with the peer; removed again if anything fails."""
    log = home.parent / f"{home.name}.log"
    python = home / "bin" / "python"
    steps = (
        [sys.executable, "-m", "venv", str(home)],
        [str(python), "-m", "pip", "install", "--no-input", "--no-cache-dir", str(archive)],
    )
    quiet = {**env, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with log.open("w") as out:
        for step in steps:
            done = subprocess.run(step, stdout=out, stderr=out, env=quiet, check=False)
            if done.returncode:
                shutil.rmtree(home, ignore_errors=True)
                raise SystemExit(f"the peer cannot be built: {shlex.join(step)} failed; {log} says why")


def main() -> int:
    """Build the peer and print its interpreter's path."""
    print(peer_python(sys.argv[1] if len(sys.argv) > 1 else "cpu", os.environ, os.cpu_count() or 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
