"""What this process allocated per device and label, and caps below the hardware's. Layer 1.

A cap makes a large device act like a small one, so that running out of memory can be arranged
on any machine. Every buffer of ours is charged here before ggml is asked for it. A dry ledger is
charged in the same way and nothing is allocated: what an engine would take is known before it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from pyggml_dflash.errors import DeviceMemoryError


@dataclass(slots=True)
class Charge:
    """Bytes held on a device under a label, until released."""

    ledger: Ledger
    device: str
    label: str
    n_bytes: int

    def release(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self.ledger._release(self)
        self.n_bytes = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class Ledger:
    """Charged bytes by device and label; used by one thread."""

    caps: Mapping[str, int] = field(default_factory=dict)  # device name -> most bytes we may hold there
    dry: bool = False  # arenas that charge here take no memory: their tensors can be measured, not used
    _held: dict[str, Counter[str]] = field(default_factory=dict)
    _peak: dict[str, int] = field(default_factory=dict)

    def charge(self, device: str, label: str, n_bytes: int) -> Charge:
        """Record `n_bytes` about to be allocated; raises `DeviceMemoryError` above the cap."""
        cap = self.caps.get(device)
        if cap is not None and self.charged(device) + n_bytes > cap:
            free = max(0, cap - self.charged(device))
            raise DeviceMemoryError(what=label, wanted=n_bytes, free=free, device=device, cap=cap)
        self._held.setdefault(device, Counter())[label] += n_bytes
        self._peak[device] = max(self.peak(device), self.charged(device))
        return Charge(self, device, label, n_bytes)

    def charged(self, device: str) -> int:
        """Bytes held on `device` now."""
        return sum(self._held.get(device, Counter()).values())

    def peak(self, device: str) -> int:
        """The most bytes ever held on `device` at once."""
        return self._peak.get(device, 0)

    def devices(self) -> tuple[str, ...]:
        """Devices that something was ever charged to."""
        return tuple(self._held)

    def by_label(self, device: str) -> dict[str, int]:
        """Bytes held on `device` by label, without empty entries."""
        return {label: n for label, n in self._held.get(device, Counter()).items() if n}

    def free(self, device: str, driver_free: int) -> int:
        """Bytes that may still be taken: the driver's figure or what the cap leaves, the smaller."""
        cap = self.caps.get(device)
        return driver_free if cap is None else min(driver_free, max(0, cap - self.charged(device)))

    def total(self, device: str, driver_total: int) -> int:
        """The device's size: the driver's figure or the cap, the smaller."""
        return min(driver_total, self.caps.get(device, driver_total))

    def _release(self, charge: Charge) -> None:
        self._held.get(charge.device, Counter())[charge.label] -= charge.n_bytes
