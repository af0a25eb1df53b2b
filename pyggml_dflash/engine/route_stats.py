"""Counting which experts a model picks over texts. Layer 6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pyggml_dflash.engine.loader import load
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import EngineOptions, check_callback, refusal
from pyggml_dflash.plan.hot_experts import RouteStats
from pyggml_dflash.requests import Progress, ProgressCallback


def route_stats(
    options: EngineOptions, texts: Sequence[str | Sequence[int]], progress: ProgressCallback | None = None
) -> RouteStats:
    """How often each expert is picked while a model reads texts, or token ids; runs on this thread."""
    if not isinstance(options, EngineOptions):
        raise refusal("options", options, "they must be EngineOptions")
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise refusal("texts", texts, "it must be a sequence of texts, or of sequences of token ids")
    check_callback("progress", progress)
    report = progress or (lambda _: None)
    options = replace(options, spec="off", expert_placement=None)
    loaded = load(options, report)
    core = loaded.core
    try:
        moe = core.moe
        if moe is None:
            raise UsageError(f"{loaded.info.model} has no routed experts to count")
        picks = np.zeros((loaded.info.n_layer, moe.n_expert), np.int64)
        all_tokens = [
            loaded.tokenizer.encode(text) if isinstance(text, str) else loaded.check_tokens(text)
            for text in texts
        ]
        total, done = sum(map(len, all_tokens)), 0
        for tokens in all_tokens:
            if len(tokens) > loaded.info.n_ctx:
                raise UsageError(f"a text has {len(tokens)} tokens; the context is {loaded.info.n_ctx}")
            for chosen in core.picks(tokens):
                for layer, ids in enumerate(chosen):
                    picks[layer] += np.bincount(ids.reshape(-1), minlength=moe.n_expert)
                done += len(chosen[0])
                report(Progress(phase="prefill", done=done, total=total))
        return RouteStats(picks, moe.n_used, total)
    finally:
        core.close()
