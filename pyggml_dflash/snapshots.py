"""The stored states of an engine, as a caller sees and handles them. Layer 7."""

from __future__ import annotations

from pyggml_dflash.engine.commands import IsCancelled
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.loop import EngineThread
from pyggml_dflash.errors import UsageError
from pyggml_dflash.requests import StoredPrefix


class Snapshots:
    """Stored states that prompts continue: `Engine.snapshots`. Works while the engine is parked, too."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def list(self) -> tuple[StoredPrefix, ...]:
        """Those in memory, the longest unused first; none where the engine stores none."""

        def read(core: EngineCore, _: IsCancelled) -> tuple[StoredPrefix, ...]:
            return () if core.reuse is None else core.reuse.list()

        return self._thread.call(read, when_parked=True)

    def clear(self) -> None:
        """Free those in memory. Files in a folder stay, and are continued."""

        def clear(core: EngineCore, _: IsCancelled) -> None:
            if core.reuse is not None:
                core.reuse.clear()

        self._thread.call(clear, when_parked=True)

    def flush(self) -> int:
        """Write to the engine's folder what it lacks; how many states were written.

        This happens by itself when a state has to go, and on `park` and `close`. `UsageError` if there is no
        folder.
        """

        def flush(core: EngineCore, _: IsCancelled) -> int:
            if core.reuse is None or core.reuse.tier is None:
                raise UsageError("kv_cache_dir is None; open the engine with a folder to write to")
            return core.reuse.flush()

        return self._thread.call(flush, when_parked=True)
