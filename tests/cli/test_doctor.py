"""`dflash doctor`: each mistake it knows is shown to it, and is found with what helps."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_cli.build_info import BuildInfo, read_build
from dflash_cli.checks import (
    check_build,
    check_command,
    check_package,
    check_requirements,
    check_variable,
)
from dflash_cli.hardware import CPU_FLAGS, check_cpu, check_devices, check_memory, try_device

import pyggml_dflash
from pyggml_dflash.api import DeviceInfo
from tests.cli.dflash_command import PICO, dflash

PACKAGE = Path(pyggml_dflash.__file__).parent
CPU = DeviceInfo(
    name="CPU",
    description="a CPU",
    kind="cpu",
    registry="CPU",
    memory_free=2**33,
    memory_total=2**34,
    is_host=True,
)
CARD = DeviceInfo(
    name="CUDA0",
    description="a card",
    kind="gpu",
    registry="CUDA",
    memory_free=2**33,
    memory_total=2**34,
    is_host=False,
)
BUILD = BuildInfo(backend="cpu", ggml="a package", cmake_args=(), files={})


def test_a_sound_installation_has_no_failure() -> None:
    done = dflash("doctor", "--json")
    found = {check["name"]: check for check in done.json["checks"]}
    assert [check for check in found.values() if check["status"] == "fail"] == []
    assert (done.code, done.json["ok"]) == (0, True)
    assert found["trial CPU"]["detail"] == "the shipped model runs"
    assert str(PACKAGE) in found["package"]["detail"]


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """The built package in a folder of its own, with the model linked to."""
    copy = tmp_path / "pyggml_dflash"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("models", "__pycache__"))
    (copy / "models").symlink_to(PICO.parent)
    return tmp_path


def doctor_in(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The text of `dflash doctor` with the package of `folder` in front of any other."""
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    return subprocess.run(
        [sys.executable, "-m", "pyggml_dflash", "doctor"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def test_a_cuda_build_without_a_card_fails_and_a_run_says_that_it_uses_the_cpu(copied_package: Path) -> None:
    record = copied_package / "pyggml_dflash" / "ggml" / "lib" / "build.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "backend": "cuda"}))
    done = doctor_in(copied_package, PYGGML_DFLASH_BACKEND="cuda")
    assert done.returncode == 1
    assert "fail  devices: built for cuda, but no such device is found; devices: " in done.stdout
    assert "CUDA_VISIBLE_DEVICES" in done.stdout
    run = dflash(
        "run",
        "-n",
        "1",
        cwd=copied_package,
        env={"PYTHONPATH": os.pathsep.join([str(copied_package), *sys.path])},
    )
    assert "dflash: built for cuda, but no such device is found; running on the CPU" in run.err


def test_a_source_tree_that_hides_the_built_package_fails(copied_package: Path) -> None:
    for module in (copied_package / "pyggml_dflash" / "ggml").glob("_ggml*.so"):
        module.unlink()
    done = doctor_in(copied_package)
    assert done.returncode == 1
    hidden = copied_package / "pyggml_dflash"
    assert f"in {hidden} has no built module; it hides the built one in {PACKAGE}" in done.stdout
    assert "fail  build: missing or changed since the build: _ggml" in done.stdout
    assert "fail  library: the compiled ggml module cannot be loaded" in done.stdout


def test_two_packages_on_the_path_are_a_warning(copied_package: Path) -> None:
    used = copied_package / "pyggml_dflash"
    check = check_package("1", used, [str(copied_package), str(PACKAGE.parent)])
    assert check.status == "warn"
    assert str(PACKAGE) in check.detail
    assert check_package("1", used, [str(copied_package), "/nowhere"]).status == "ok"


def test_missing_requirements_are_named() -> None:
    check = check_requirements({"numpy": "2.0", "rich": None, "click": None})
    assert (check.status, check.remedy) == ("fail", "pip install rich click")
    assert check_requirements({"numpy": "2.0"}).detail == "numpy 2.0"


def test_a_build_without_a_record_or_with_another_file_fails(tmp_path: Path) -> None:
    assert read_build(tmp_path) is None
    assert check_build(None, tmp_path).status == "fail"
    build = dataclasses.replace(BUILD, files={"lib/a.so": 3})
    (tmp_path / "lib").mkdir()
    assert "lib/a.so" in check_build(build, tmp_path).detail
    (tmp_path / "lib" / "a.so").write_bytes(b"abcd")
    assert check_build(build, tmp_path).status == "fail"
    (tmp_path / "lib" / "a.so").write_bytes(b"abc")
    assert check_build(build, tmp_path).status == "ok"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"backend": "cpu"}', "\0"])
def test_a_damaged_record_is_no_build(tmp_path: Path, content: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "build.json").write_text(content)
    assert read_build(tmp_path) is None


@pytest.mark.parametrize(
    ("environment", "status"),
    [({}, "ok"), ({"PYGGML_DFLASH_BACKEND": "cpu"}, "ok"), ({"PYGGML_DFLASH_BACKEND": "cuda"}, "warn")],
)
def test_a_back_end_asked_for_after_the_build_is_a_warning(environment: dict[str, str], status: str) -> None:
    assert check_variable(BUILD, environment).status == status


def script(folder: Path, text: str) -> Path:
    folder.mkdir()
    path = folder / "dflash"
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_dflash_that_is_first_on_the_path_is_known(tmp_path: Path) -> None:
    mine = script(tmp_path / "mine", f"#!{sys.executable}\nfrom dflash_cli.main import main\n")
    theirs = script(tmp_path / "theirs", f"#!{sys.executable}\nfrom dflash.cli import main\n")
    other = script(tmp_path / "other", "#!/opt/python/bin/python3\nfrom dflash_cli.main import main\n")

    def check(*paths: Path) -> tuple[str, str]:
        found = check_command(os.pathsep.join(str(path.parent) for path in paths), sys.executable)
        return found.status, found.detail

    assert check(mine, theirs) == ("ok", f"{mine} is first on PATH and is this package's")
    status, detail = check(theirs, mine)
    assert status == "warn"
    assert detail == f"{theirs} is first on PATH, in front of {mine} and belongs to another package"
    status, detail = check(other, mine)
    assert status == "warn"
    assert "another Python than this one" in detail
    assert check(tmp_path / "nothing" / "here") == ("warn", "no 'dflash' on PATH")


@pytest.mark.parametrize(
    ("backend", "devices", "hardware", "status"),
    [
        ("cpu", [CPU], [], "ok"),
        ("cpu", [CPU], ["cuda"], "warn"),
        ("cuda", [CPU], [], "fail"),
        ("cuda", [CPU], ["cuda"], "fail"),
        ("vulkan", [], [], "fail"),
        ("cuda", [CARD, CPU], ["cuda"], "ok"),
    ],
)
def test_a_build_is_held_against_the_devices(
    backend: str, devices: list[DeviceInfo], hardware: list[str], status: str
) -> None:
    check = check_devices(backend, devices, hardware)
    assert check.status == status
    assert bool(check.remedy) == (status != "ok")


def test_a_build_is_held_against_the_cpu() -> None:
    flags = frozenset({"avx", "avx2", "fma"})
    compiled = {"AVX": "1", "AVX2": "1", "FMA": "1", "OPENMP": "1"}
    assert check_cpu(compiled, flags).status == "ok"
    assert check_cpu(compiled, frozenset()).status == "ok"  # nobody knows
    lacking = check_cpu({**compiled, "AVX512": "1"}, flags)
    assert (lacking.status, lacking.detail) == ("fail", "built for AVX512, which this CPU lacks")
    unused = check_cpu({"AVX": "1", "AVX2": "0"}, flags)
    assert (unused.status, unused.detail) == ("warn", "built without AVX2, FMA, which this CPU has")
    assert len(set(CPU_FLAGS.values())) == len(CPU_FLAGS)


def test_little_free_memory_is_a_warning() -> None:
    assert check_memory(CPU).status == "ok"
    assert check_memory(dataclasses.replace(CPU, memory_free=2**20)).status == "warn"


def test_a_device_on_which_the_model_does_not_run_fails_with_the_reason() -> None:
    check = try_device(CARD)  # which this machine does not have by this name, or has
    if "CUDA0" in dflash("devices").out:
        assert check.status == "ok", check.detail
    else:
        assert check.status == "fail"
        assert "device is 'CUDA0'" in check.detail
