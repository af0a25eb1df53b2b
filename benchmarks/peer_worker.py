"""The worker that computes with llama-cpp-python, through llama.cpp's C functions; run by its interpreter.

It does what `ours_worker` does and nothing more: prefill with the logits of the last row, then one forward
per token with the best token fed back. llama-cpp-python's own sampling in Python is not used.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as c  # type: ignore[import-not-found]
import numpy as np
from worker import Answer, serve

FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
ALL_LAYERS = 999
LOG_LEVEL_ERROR = 4
ROUTED_EXPERTS = rb"\.ffn_(up|down|gate|gate_up)_exps"


class Placed(ctypes.Structure):
    """llama.h's `llama_model_tensor_buft_override`: where tensors go whose names match."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def experts_on_cpu() -> Any:
    """What `--cpu-moe` of llama.cpp's programs does, ended by an empty entry."""
    cpu = c.llama_cpp._lib.ggml_backend_cpu_buffer_type
    cpu.restype = ctypes.c_void_p
    return (Placed * 2)(Placed(ROUTED_EXPERTS, cpu()), Placed(None, None))


@c.llama_log_callback  # type: ignore[untyped-decorator]
def _log_errors(level: int, text: bytes, user_data: Any) -> None:
    if level == LOG_LEVEL_ERROR:
        print(text.decode(errors="replace"), end="")


class Peer:
    """A llama.cpp context and the commands on it."""

    def __init__(self) -> None:
        self._context: Any = None
        self._n_vocab = 0
        c.llama_log_set(_log_errors, None)
        c.llama_backend_init()

    def answer(self, command: Answer) -> Answer:
        """Carry out one command."""
        if command["op"] == "open":
            return self._open(command)
        return self._run(command["tokens"], command["n_decode"])

    def _open(self, command: Answer) -> Answer:
        params = c.llama_model_default_params()
        on_gpu = (command["device"] or "cpu").lower() != "cpu"
        params.n_gpu_layers = ALL_LAYERS if on_gpu else 0
        params.use_extra_bufts = command["repack"]
        placed = experts_on_cpu()
        if command["experts_on_cpu"]:
            params.tensor_buft_overrides = ctypes.addressof(placed)
        model = c.llama_model_load_from_file(command["model"].encode(), params)
        if model is None:
            raise ValueError(f"llama.cpp cannot load {command['model']}")
        self._n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self._context = c.llama_init_from_model(model, self._context_params(command, on_gpu))
        if self._context is None:
            raise ValueError("llama.cpp cannot make a context")
        return {"system": c.llama_print_system_info().decode(), "version": c.__version__}

    @staticmethod
    def _context_params(command: Answer, on_gpu: bool) -> Any:
        params = c.llama_context_default_params()
        params.n_ctx = command["n_ctx"]
        params.n_batch = params.n_ubatch = command["chunk"]
        params.n_threads = params.n_threads_batch = command["threads"]
        params.type_k = params.type_v = KV_TYPES[command["kv"]]
        params.flash_attn_type = FLASH_ATTN[command["flash_attn"]]
        params.offload_kqv = params.op_offload = on_gpu
        params.no_perf = True
        return params

    def _run(self, tokens: list[int], n_decode: int) -> Answer:
        """Prefill, then `n_decode` forwards of one token each; the token after the last is chosen too."""
        context, n_batch = self._context, c.llama_n_batch(self._context)
        c.llama_memory_clear(c.llama_get_memory(context), False)
        prompt = (c.llama_token * len(tokens))(*tokens)
        one, chosen = (c.llama_token * 1)(), []
        started = time.perf_counter()
        for at in range(0, len(tokens), n_batch):
            part = (c.llama_token * min(n_batch, len(tokens) - at)).from_buffer(prompt, 4 * at)
            self._decode(part)
        logits = self._logits()
        prefilled = time.perf_counter()
        for _ in range(n_decode):
            one[0] = int(logits.argmax())
            chosen.append(one[0])
            self._decode(one)
            logits = self._logits()
        chosen.append(int(logits.argmax()))
        return {
            "prefill_s": prefilled - started,
            "decode_s": time.perf_counter() - prefilled,
            "tokens": chosen,
        }

    def _decode(self, tokens: Any) -> None:
        if c.llama_decode(self._context, c.llama_batch_get_one(tokens, len(tokens))):
            raise ValueError("llama_decode failed")

    def _logits(self) -> Any:
        """The last row's logits, float32 [n_vocab], without a copy; waits for them."""
        row = c.llama_get_logits_ith(self._context, -1)
        address = ctypes.addressof(row.contents)
        return np.ctypeslib.as_array((ctypes.c_float * self._n_vocab).from_address(address))


if __name__ == "__main__":
    serve(Peer().answer)
