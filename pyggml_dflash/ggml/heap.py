"""Free memory of the C library's heap, and giving it back to the system. Layer 1.

What is freed stays with the process where something that is still in use lies behind it.
"""

from __future__ import annotations

from pyggml_dflash.ggml.ffi import lib


def release_free_heap() -> bool:
    """Give free pages of every thread's heap back to the system; true if there were any.

    Takes milliseconds, and a fault for each page that is used again. Always false where the C library cannot
    do it: glibc can.
    """
    return bool(lib.dflash_release_free_heap())
