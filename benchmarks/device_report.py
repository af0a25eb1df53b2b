"""What a section of `device_check` is given and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyggml_dflash.ggml.device import choose_device


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the device: what was found, what was expected."""

    section: str
    what: str
    found: str
    expected: str
    holds: bool


@dataclass(slots=True)
class Report:
    """What a section found."""

    section: str
    checks: list[Check] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def check(self, what: str, found: object, expected: object, holds: bool | None = None) -> None:
        """Record a check; it holds if found equals expected, or as told."""
        holds = found == expected if holds is None else holds
        self.checks.append(Check(self.section, what, str(found), str(expected), bool(holds)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every section is given."""

    out: Path
    scratch: Path  # for files that do not come back
    peer_python: Path | None
    big_model: Path | None

    @property
    def device(self) -> str:
        """The first GPU's name, or the CPU's."""
        return choose_device(None).name
