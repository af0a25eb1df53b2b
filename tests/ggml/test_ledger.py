"""The ledger knows what is held where and for what, and a cap is never passed."""

from __future__ import annotations

import pytest

from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.ledger import Ledger


def test_bytes_are_counted_by_device_and_label() -> None:
    ledger = Ledger()
    first = ledger.charge("CPU", "weights", 100)
    ledger.charge("CPU", "state", 20)
    ledger.charge("CPU", "weights", 3)
    ledger.charge("GPU", "state", 7)
    assert ledger.charged("CPU") == 123
    assert ledger.by_label("CPU") == {"weights": 103, "state": 20}
    assert ledger.by_label("GPU") == {"state": 7}
    assert ledger.devices() == ("CPU", "GPU")
    first.release()
    assert ledger.by_label("CPU") == {"weights": 3, "state": 20}


def test_what_is_released_is_gone_once() -> None:
    ledger = Ledger()
    charge = ledger.charge("CPU", "weights", 100)
    ledger.charge("CPU", "weights", 1)
    charge.release()
    charge.release()
    assert ledger.charged("CPU") == 1
    with ledger.charge("CPU", "scratch", 50):
        assert ledger.charged("CPU") == 51
    assert ledger.by_label("CPU") == {"weights": 1}


def test_the_peak_stays_when_bytes_go() -> None:
    ledger = Ledger()
    ledger.charge("CPU", "a", 10).release()
    with ledger.charge("CPU", "b", 30), ledger.charge("CPU", "c", 5):
        pass
    ledger.charge("CPU", "d", 20)
    assert (ledger.peak("CPU"), ledger.charged("CPU"), ledger.peak("GPU")) == (35, 20, 0)


def test_a_cap_is_reached_but_not_passed() -> None:
    ledger = Ledger(caps={"CPU": 100})
    ledger.charge("CPU", "weights", 60)
    ledger.charge("GPU", "weights", 1000)
    with pytest.raises(DeviceMemoryError) as raised:
        ledger.charge("CPU", "state", 41)
    error = raised.value
    assert (error.what, error.wanted, error.free, error.device) == ("state", 41, 40, "CPU")
    assert str(error) == (
        "CPU: no room for state (41 B wanted, 40 B left of --device-cap CPU=100B; CPU=1 would do for it)"
    )
    assert ledger.by_label("CPU") == {"weights": 60}
    assert ledger.peak("CPU") == 60
    ledger.charge("CPU", "state", 40)
    assert ledger.charged("CPU") == 100


def test_free_is_what_driver_and_cap_both_leave() -> None:
    ledger = Ledger(caps={"CPU": 100})
    assert ledger.free("CPU", 1000) == 100
    assert ledger.free("CPU", 30) == 30
    ledger.charge("CPU", "weights", 80)
    assert ledger.free("CPU", 1000) == 20
    assert ledger.free("GPU", 1000) == 1000


def test_a_capped_device_is_as_large_as_its_cap_at_most() -> None:
    ledger = Ledger(caps={"CPU": 100})
    assert [ledger.total(device, 1000) for device in ("CPU", "CUDA0")] == [100, 1000]
    assert ledger.total("CPU", 50) == 50


def test_a_cap_below_what_is_held_leaves_nothing_free() -> None:
    caps: dict[str, int] = {}
    ledger = Ledger(caps=caps)
    ledger.charge("CPU", "weights", 80)
    caps["CPU"] = 50
    assert ledger.free("CPU", 1000) == 0
    with pytest.raises(DeviceMemoryError, match="0 B left of --device-cap"):
        ledger.charge("CPU", "state", 1)


def test_unknown_devices_hold_nothing() -> None:
    ledger = Ledger()
    assert (ledger.charged("x"), ledger.peak("x"), ledger.by_label("x"), ledger.devices()) == (0, 0, {}, ())
