"""Constraints tried out in a process of their own, before this one compiles them. Layer 6.

llguidance bounds much of its work, but not all: some grammars of a few hundred letters take it minutes or
all memory, and deep ones overflow the stack, which ends a process. Run as a script this module compiles what
it is sent within limits; it imports nothing of ours then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

CPU_S: Final = 3
WALL_S: Final = 60.0  # for a machine that is busy with other things
MEMORY_BYTES: Final = 2 << 30
# A level of a deep grammar takes up to 8 KiB. Memory is taken only where the stack is used.
STACK_BYTES: Final = 512 << 20

T = TypeVar("T")
_stack_size = threading.Lock()  # what a thread is given is set for the whole process


def survives(grammar: str, limits: Mapping[str, Any]) -> bool:
    """True if llguidance gets done with `grammar`, be it valid or not, in bounded time, memory and stack.

    OSError: no process can be started.
    """
    message = {"path": sys.path, "grammar": grammar, "limits": limits}
    try:
        done = subprocess.run(
            [sys.executable or "python3", "-I", str(Path(__file__))],
            input=json.dumps(message).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def on_deep_stack(function: Callable[[], T]) -> T:
    """What `function` returns or raises, run on a thread that deep recursion does not overflow."""
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dflash-constraint", daemon=True)
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


class _Bytes:
    """A vocabulary of bytes: what takes long does so with it, too."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<|end|>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _main() -> None:
    message = json.load(sys.stdin)
    sys.path[:] = message["path"]
    import resource

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    with suppress(ValueError, OSError):  # some systems cannot
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = LLParserLimits(**message["limits"])
    vocabulary: Any = LLTokenizer(_Bytes())  # type: ignore[arg-type]
    on_deep_stack(
        lambda: LLMatcher(vocabulary, message["grammar"], log_level=0, limits=limits).compute_bitmask()
    )


if __name__ == "__main__":
    _main()
