"""What is said of packages that a feature lacks."""

from __future__ import annotations

import pytest

from pyggml_dflash import extras

INSTALLED = [
    "cffi>=1.17",
    "tomli>=2; python_version < '3.11'",
    "fastapi>=0.115; extra == 'serve'",
    'uvicorn>=0.30; extra == "serve"',
    "ray[data]>=2.60; extra == 'ray'",
    "pyggml-dflash[serve]; extra == 'test'",
]


def test_a_hint_names_the_packages_of_the_extra_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: INSTALLED)
    assert extras.install_hint("serve") == 'pip install "fastapi>=0.115" "uvicorn>=0.30"'
    assert extras.install_hint("ray") == 'pip install "ray[data]>=2.60"'


def test_a_checkout_on_the_path_is_told_to_install_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", none)
    assert extras.install_hint("serve") == 'pip install ".[serve]" in the source checkout'
