"""Packages that only some features need, and how to install them. Layer 0."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires


def install_hint(extra: str) -> str:
    """The command that installs what an extra of this package names, however the package itself came here.

    By the packages' own names: this one may have come from a checkout, a wheel or an index.
    """
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    try:
        found = [text.partition(";") for text in requires("pyggml-dflash") or ()]
    except PackageNotFoundError:  # a checkout that was put on Python's path
        found = []
    names = [f'"{name.strip()}"' for name, _, condition in found if marker.search(condition)]
    return f"pip install {' '.join(names)}" if names else f'pip install ".[{extra}]" in the source checkout'
