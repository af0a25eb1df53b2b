"""Every error the package raises, as one tree. Layer 0: knows nothing else of ours.

    DflashError                     exit 1
    ├── UsageError                  exit 2   a value was refused: also a ValueError
    ├── ModelFileError              exit 3   missing, damaged or unsupported file
    │   ├── DamagedFileError                 the bytes contradict themselves or are cut short
    │   └── UnsupportedModelError            a sound file that this package cannot run
    ├── ContextFitError             exit 4   the context asked for does not fit the devices
    ├── ContextOverflowError        exit 4   this prompt does not fit the context
    ├── QueueFullError              exit 1   more requests wait than may
    ├── DeviceMemoryError           exit 1   an allocation failed; the engine stays usable
    ├── SnapshotError               exit 1   a stored state cannot be used here; nothing was changed
    ├── BackendError                exit 1   ggml reported a failure, or the library is missing
    │   └── DeviceLostError                  a worker behind the network is gone: open the engine again
    ├── EngineClosed                exit 1   use after close
    ├── EngineParked                exit 1   the engine's memory was given back; unpark it first
    └── Cancelled                   exit 130 the request was cancelled before it ended

A class exists where a caller could act on it. The command line turns `exit_code` into its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def human_bytes(n: int) -> str:
    """`n` bytes in the binary unit that keeps it readable: 1536 -> '1.5 KiB'."""
    value, units = float(n), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(value) < 1024 or unit == units[-1]:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def quoted(value: object) -> str:
    """A value as messages show it: cut where it would fill the screen, whatever it is."""
    try:
        shown = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return f"a number of {type(value).__name__} with thousands of digits"
    except RecursionError:
        return "nested too deeply to be shown"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def cap_text(device: str, n_bytes: int) -> str:
    """The value of --device-cap that holds a device to so many bytes: in MiB where these are whole."""
    return f"{device}={n_bytes}B" if n_bytes % 2**20 else f"{device}={n_bytes // 2**20}"


def room_on(device: str, cap: int | None) -> str:
    """What a device has room for, in words; `cap`: bytes that it is held to, if these are what binds."""
    return f"{device} has free" if cap is None else f"--device-cap {cap_text(device, cap)} leaves"


class DflashError(Exception):
    """Base of every error that the package raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:  # by its message, which `__init__` need not take
        return _remade, (type(self), self.args, vars(self))


def _remade(kind: type[DflashError], args: tuple[object, ...], fields: dict[str, object]) -> DflashError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class UsageError(DflashError, ValueError):
    """A value was refused; the message quotes it and says what would work."""

    exit_code = 2

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        """`param`: the path of the member that was refused, where the value came in a request's body."""
        self.param = param
        super().__init__(message)


class ModelFileError(DflashError):
    """A model file cannot be used."""

    exit_code = 3


class DamagedFileError(ModelFileError):
    """The file is cut short or contradicts itself."""


class UnsupportedModelError(ModelFileError):
    """The file is sound, but describes something that this package cannot run."""


class ContextFitError(DflashError):
    """The context asked for does not fit the devices."""

    exit_code = 4

    def __init__(
        self,
        *,
        asked: int,
        fits: int,
        missing: int,
        device: str,
        smaller_types: Mapping[str, int] | None = None,
        drafting: bool = False,
        cap: int | None = None,
        larger_cap: int | None = None,
    ) -> None:
        """`fits`: the largest context that fits, 0 for none; `smaller_types`: by type of keys and values;
        `drafting`: a drafter was counted too; `cap`: what the device is held to, if that binds;
        `larger_cap`: one that the context fits, if there is one."""
        self.asked, self.fits, self.missing, self.device = asked, fits, missing, device
        self.smaller_types = dict(smaller_types or {})
        self.cap, self.larger_cap = cap, larger_cap
        would = f"--max-ctx {fits} would fit" if fits else "no context would fit beside the weights"
        if self.smaller_types:
            listed = ", ".join(f"{n} with {name}" for name, n in self.smaller_types.items())
            would += f"; with a smaller type of keys and values: {listed}"
        what = f"context {asked}"
        if drafting:
            what, would = f"{what} with drafting", f"{would}; --spec off needs less"
        if larger_cap is not None:
            would += f"; context {asked} needs --device-cap {cap_text(device, larger_cap)}"
        super().__init__(f"{what} needs {human_bytes(missing)} more than {room_on(device, cap)}; {would}")


class ContextOverflowError(DflashError):
    """Prompt and answer together are longer than the context."""

    exit_code = 4

    def __init__(
        self, *, n_prompt: int, max_tokens: int | None, n_ctx: int, n_ctx_train: int | None = None
    ) -> None:
        """`n_ctx_train`: the most that a context of this model can have; None: unknown."""
        self.n_prompt, self.max_tokens, self.n_ctx = n_prompt, max_tokens, n_ctx
        larger = ", or open with a larger --max-ctx"
        if n_ctx_train is not None and n_ctx >= n_ctx_train:
            larger = "; this model has no larger context"
        super().__init__(self.request_advice + larger)

    @property
    def request_advice(self) -> str:
        """What is wrong, and what can be done by a caller that the engine does not belong to."""
        asked = f"prompt of {self.n_prompt} tokens"
        room = self.n_ctx - self.n_prompt + 1  # the last token of an answer takes none
        if not self.max_tokens:
            least = max(1, self.n_prompt - self.n_ctx)
            return (
                f"{asked} exceeds the context of {self.n_ctx}; shorten the prompt by at least {least} tokens"
            )
        problem = f"{asked} and {self.max_tokens} to generate exceed the context of {self.n_ctx}"
        if room < 1:
            return f"{problem}; shorten the prompt by at least {1 - room} tokens and ask for fewer"
        return f"{problem}; ask for at most {room}, or shorten the prompt"


class QueueFullError(DflashError):
    """So many requests wait for a slot that this one was refused; a later one may be taken."""

    def __init__(self, *, n_waiting: int, limit: int) -> None:
        self.n_waiting, self.limit = n_waiting, limit
        super().__init__(
            f"{n_waiting} requests wait for a slot, and at most {limit} may; try again later, or open with "
            f"more --slots or a larger --queue-limit"
        )


class DeviceMemoryError(DflashError):
    """A device had no room for an allocation; what was allocated before is intact."""

    def __init__(
        self, *, what: str, wanted: int, free: int | None, device: str, cap: int | None = None
    ) -> None:
        """`cap`: what the device is held to, if that binds; `free` is what is left of it then."""
        self.what, self.wanted, self.free, self.device, self.cap = what, wanted, free, device, cap
        rest = "" if free is None else f", {human_bytes(free)} free"
        if cap is not None and free is not None:
            least = cap_text(device, -(-(cap - free + wanted) // 2**20) * 2**20)
            rest = (
                f", {human_bytes(free)} left of --device-cap {cap_text(device, cap)}; {least} would do for it"
            )
        super().__init__(f"{device}: no room for {what} ({human_bytes(wanted)} wanted{rest})")


class SnapshotError(DflashError):
    """A stored state cannot be used; the slot it was meant for is as it was. `reason` is short and fixed."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class BackendError(DflashError):
    """ggml reported a failure, or its library cannot be loaded."""


class DeviceLostError(BackendError):
    """A device of another process no longer answers; what it held is gone, and its engine of no more use."""

    def __init__(self, device: str) -> None:
        self.device = device
        super().__init__(f"{device} no longer answers; start the worker again and open the engine anew")


class EngineClosed(DflashError):
    """The engine, or an object that belongs to it, was used after `close`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed")


class EngineParked(DflashError):
    """The engine gave its memory back with `park`; what needs it works again after `unpark`."""

    def __init__(self) -> None:
        super().__init__("the engine is parked; unpark() brings it back")


class Cancelled(DflashError):
    """The request was cancelled before it ended."""

    exit_code = 130
