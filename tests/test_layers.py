"""Imports go down the layers only, and C is behind one door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = (ROOT / "pyggml_dflash", ROOT / "cli" / "dflash_cli")

# A module belongs to the layer of the longest name here that it begins with.
LAYERS: Final = {
    "pyggml_dflash.errors": 0,
    "pyggml_dflash.extras": 0,
    "pyggml_dflash.measures": 0,
    "pyggml_dflash.options": 0,
    "pyggml_dflash.requests": 0,
    "pyggml_dflash.ggml": 1,
    "pyggml_dflash.model": 2,
    "pyggml_dflash.plan": 3,
    "pyggml_dflash.arch": 4,
    "pyggml_dflash.state": 5,
    "pyggml_dflash.engine": 6,
    "pyggml_dflash.api": 7,
    "pyggml_dflash.batch": 7,
    "pyggml_dflash.openai": 7,
    "pyggml_dflash.streams": 7,
    "pyggml_dflash": 7,  # its names are those of `api` and of layer 0
    "pyggml_dflash.serve": 8,
    "pyggml_dflash.jsonl": 8,
    "dflash_cli": 9,
    "pyggml_dflash.__main__": 9,  # starts the command line
}
TOGETHER: Final = {0, 7, 9}  # modules of these layers may import each other, as those of one package may
# These layers see the public face only, not what lies behind it.
FACES: Final = {8: {0, 7}, 9: {0, 7, 8}}
DOOR: Final = "pyggml_dflash.ggml"
BEHIND_THE_DOOR: Final = ("pyggml_dflash.ggml._ggml", "pyggml_dflash.ggml.ffi")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, and where that is written."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours by its name."""
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES: Final = dict(modules())


def imports(name: str, text: str) -> Iterator[Import]:
    """Imports of our own modules anywhere in a module's text, inside functions and for types as well."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} has a relative import"
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            found = [full if full in MODULES or full in BEHIND_THE_DOOR else module for full in inner]
        else:
            continue
        for imported in dict.fromkeys(found):
            if imported.split(".")[0] in ("pyggml_dflash", "dflash_cli"):
                yield Import(name, imported, node.lineno)


def package(name: str) -> str:
    """The name in the table that a module belongs to."""
    return max((prefix for prefix in LAYERS if f"{name}.".startswith(f"{prefix}.")), key=len)


def layer(name: str) -> int:
    return LAYERS[package(name)]


def is_allowed(found: Import) -> bool:
    own, other = layer(found.importer), layer(found.imported)
    if found.imported.startswith(BEHIND_THE_DOOR) and not found.importer.startswith(DOOR):
        return False
    if package(found.importer) == package(found.imported) or (own == other and own in TOGETHER):
        return True
    return other < own and (own not in FACES or other in FACES[own])


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_lies_below_it(name: str) -> None:
    found = imports(name, MODULES[name].read_text())
    assert [str(i) for i in found if not is_allowed(i)] == []


def test_every_module_of_ours_is_in_the_table() -> None:
    assert len(MODULES) > 40
    named = {"pyggml_dflash", "pyggml_dflash.__main__", "pyggml_dflash.api", "dflash_cli"}
    named |= {"pyggml_dflash.snapshots"}
    for name in MODULES:
        assert package(name) != "pyggml_dflash" or name in named | {"pyggml_dflash.models"}, name


def test_layer_0_imports_nothing_else_of_ours() -> None:
    own = {name for name, n in LAYERS.items() if n == 0}
    for name in own:
        assert {i.imported for i in imports(name, MODULES[name].read_text())} <= own
    assert not list(imports("pyggml_dflash.errors", MODULES["pyggml_dflash.errors"].read_text()))


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("pyggml_dflash.model.x", "from pyggml_dflash.engine.core import EngineCore", False),
        ("pyggml_dflash.model.x", "from pyggml_dflash.ggml.gguf import GgufFile", True),
        ("pyggml_dflash.model.x", "from pyggml_dflash.ggml.ffi import lib", False),
        ("pyggml_dflash.model.x", "from pyggml_dflash.ggml import _ggml", False),
        ("pyggml_dflash.model.x", "def f():\n    import pyggml_dflash.arch", False),
        ("pyggml_dflash.ggml.x", "from pyggml_dflash.ggml.ffi import lib", True),
        ("pyggml_dflash.ggml.x", "from pyggml_dflash.model.config import ModelConfig", False),
        ("pyggml_dflash.arch.x", "from pyggml_dflash.state.slot import Slot", False),
        ("pyggml_dflash.state.x", "from pyggml_dflash.arch.base import StateLayout", True),
        ("pyggml_dflash.errors", "from pyggml_dflash.options import Switch", True),
        ("pyggml_dflash.options", "from pyggml_dflash.ggml.element import ElementType", False),
        ("pyggml_dflash.engine.x", "from pyggml_dflash.api import Engine", False),
        ("pyggml_dflash.engine.x", "from pyggml_dflash import Engine", False),
        ("dflash_cli.x", "from pyggml_dflash.api import Engine", True),
        ("dflash_cli.x", "from pyggml_dflash import Engine, errors", True),
        ("dflash_cli.x", "from pyggml_dflash.engine.core import EngineCore", False),
        ("dflash_cli.x", "from pyggml_dflash import ggml", False),
        ("pyggml_dflash.serve.x", "from pyggml_dflash.engine.loop import EngineThread", False),
        ("pyggml_dflash.serve.x", "from pyggml_dflash.api import Engine", True),
        ("pyggml_dflash.api", "from dflash_cli.main import main", False),
    ],
)
def test_the_rule_itself(name: str, text: str, allowed: bool) -> None:
    (found,) = imports(name, text) if "errors" not in text else list(imports(name, text))[:1]
    assert is_allowed(found) is allowed


def test_a_relative_import_is_found() -> None:
    with pytest.raises(AssertionError, match="relative"):
        list(imports("pyggml_dflash.arch.x", "from .base import Step"))
