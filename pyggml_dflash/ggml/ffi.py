"""The door to C: imports the built module and routes ggml's log. Layer 1.

Only files of this package import `ffi` and `lib`; nothing above sees a cdata or a C name.
"""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

from pyggml_dflash.errors import BackendError

try:
    from pyggml_dflash.ggml import _ggml
except ImportError as error:  # the message is what a user of a half-installed tree needs
    raise BackendError(
        f"the compiled ggml module cannot be loaded ({error}); "
        "install the package with 'pip install .' and leave the source checkout, or stay there and run "
        "'pip install -e .'"
    ) from error

CData: TypeAlias = Any

ffi = _ggml.ffi
lib = _ggml.lib

_log = logging.getLogger("pyggml_dflash.ggml")
_LEVELS = {
    lib.GGML_LOG_LEVEL_INFO: logging.DEBUG,  # ggml's chatter about what it found
    lib.GGML_LOG_LEVEL_WARN: logging.WARNING,
    lib.GGML_LOG_LEVEL_ERROR: logging.ERROR,
}


@ffi.def_extern()
def dflash_log(level: int, text: CData, user_data: CData) -> None:
    """Hand a line of ggml's log to `logging`; called by any of ggml's threads."""
    del user_data
    line = c_string(text).rstrip()
    if line:
        _log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


lib.ggml_log_set(lib.dflash_log, ffi.NULL)


def c_string(pointer: CData) -> str:
    """Text behind a C string; empty for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")
