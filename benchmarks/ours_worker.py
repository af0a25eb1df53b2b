"""The worker that computes with pyggml_dflash; commands are those of `rates.Side`.

A repetition is one `Engine.stream` call, timed by the engine itself, so Python's share of prefill and
decode counts: token choice, detokenizing, and handing pieces to the reader.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worker import Answer, serve

from pyggml_dflash import Engine


class Ours:
    """An engine and the commands on it."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def answer(self, command: Answer) -> Answer:
        """Carry out one command."""
        if command["op"] == "open":
            return self._open(command)
        assert self._engine is not None, "no model is open"
        if command["op"] == "tokenize":
            return {"tokens": self._engine.tokenize(command["text"])}
        return self._run(command["tokens"], command["n_decode"])

    def _open(self, command: Answer) -> Answer:
        placement = {"expert_device": "CPU"} if command["experts_on_cpu"] else {}
        options = {
            "max_ctx": command["n_ctx"],
            "chunk": command["chunk"],
            "device": command["device"],
            "spec": "off",  # the peer decodes plainly too
            "threads": command["threads"],
            "cache_type_k": command["kv"],
            "cache_type_v": command["kv"],
            "flash_attn": command["flash_attn"],
            "repack": "auto" if command["repack"] else "off",
            "prefix_cache_max_mib": 0,  # the same prompt is read again and again
            **placement,
            **command["ours"],
        }
        self._engine = Engine.open(command["model"], **options)
        info = self._engine.info
        return {
            "pid": os.getpid(),
            "device": info.device,
            "weights": info.weight_bytes,
            "chunk": info.chunk,
            "stream_rows": info.stream_rows,
            "planned": {d.device: sum(d.terms.values()) for d in self._engine.fit_report().devices},
        }

    def _run(self, tokens: list[int], n_decode: int) -> Answer:
        """Prefill, then `n_decode` forwards of one token each; the token after the last is chosen too."""
        assert self._engine is not None
        with self._engine.stream(tokens, max_tokens=n_decode + 1, ignore_eos=True) as stream:
            for _ in stream:
                pass
            result = stream.result
        timings = result.timings
        return {
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            "tokens": list(result.tokens),
        }


if __name__ == "__main__":
    serve(Ours().answer)
