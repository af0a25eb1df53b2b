"""The package's public names, and what importing it costs."""

from __future__ import annotations

import ast
import copy
import pickle
import sys
from pathlib import Path

import pytest

import pyggml_dflash
from pyggml_dflash import errors
from tests.engine.apart import program

HEAVY = {"numpy", "tokenizers", "jinja2", "cffi", "_cffi_backend", "click", "rich", "asyncio"}


def test_public_names_are_sorted_and_there() -> None:
    names = pyggml_dflash.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(pyggml_dflash, name) is not None
    assert dir(pyggml_dflash) == names


def test_public_names_are_what_type_checkers_see() -> None:
    source = pyggml_dflash.__file__
    assert source is not None
    tree = ast.parse(Path(source).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen | {"__version__"} == set(pyggml_dflash.__all__)


def test_every_error_is_public() -> None:
    values = vars(errors).items()
    own = {name for name, value in values if isinstance(value, type) and issubclass(value, Exception)}
    assert own <= set(pyggml_dflash.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pyggml_dflash' has no attribute 'Motor'"):
        _ = pyggml_dflash.Motor


def test_importing_the_package_loads_nothing_heavy() -> None:
    done = program("import sys, pyggml_dflash; print(*sorted(name.split('.')[0] for name in sys.modules))")
    assert done.returncode == 0, done.stderr
    assert HEAVY.isdisjoint(done.stdout.split())


def test_errors_and_options_load_neither_numpy_nor_ggml() -> None:
    names = "EngineOptions, SamplingOptions, GenerationRequest, DflashError"
    done = program(f"import sys; from pyggml_dflash import {names}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert (HEAVY - {"asyncio"}).isdisjoint(loaded)
    assert "pyggml_dflash.ggml" not in loaded


ERRORS = [
    errors.UsageError("a"),
    errors.DamagedFileError("b"),
    errors.BackendError("c"),
    errors.ContextFitError(asked=8, fits=4, missing=100, device="CPU"),
    errors.ContextOverflowError(n_prompt=5, max_tokens=None, n_ctx=4),
    errors.QueueFullError(n_waiting=3, limit=2),
    errors.DeviceMemoryError(what="state", wanted=10, free=None, device="CPU"),
    errors.SnapshotError("data is damaged", "blk.0.k"),
    errors.EngineClosed("Engine"),
    errors.Cancelled("d"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_the_way_between_processes(error: errors.DflashError) -> None:
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert vars(back) == vars(error)


@pytest.mark.parametrize(
    ("error", "code", "bases"),
    [
        (errors.DflashError, 1, (Exception,)),
        (errors.UsageError, 2, (errors.DflashError, ValueError)),
        (errors.ModelFileError, 3, (errors.DflashError,)),
        (errors.DamagedFileError, 3, (errors.ModelFileError,)),
        (errors.UnsupportedModelError, 3, (errors.ModelFileError,)),
        (errors.ContextFitError, 4, (errors.DflashError,)),
        (errors.ContextOverflowError, 4, (errors.DflashError,)),
        (errors.QueueFullError, 1, (errors.DflashError,)),
        (errors.DeviceMemoryError, 1, (errors.DflashError,)),
        (errors.SnapshotError, 1, (errors.DflashError,)),
        (errors.BackendError, 1, (errors.DflashError,)),
        (errors.EngineClosed, 1, (errors.DflashError,)),
        (errors.Cancelled, 130, (errors.DflashError,)),
    ],
)
def test_each_error_has_its_exit_code(
    error: type[errors.DflashError], code: int, bases: tuple[type, ...]
) -> None:
    assert error.exit_code == code
    assert error.__bases__ == bases


def test_sizes_are_written_for_people() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 2**30: "1.0 GiB", 2**60: "1048576.0 TiB"}
    assert [errors.human_bytes(n) for n in sizes] == list(sizes.values())


def test_the_tests_run_on_a_python_that_the_package_supports() -> None:
    assert sys.version_info >= (3, 10)
