"""A model that says what it is told to: after its first token it gives pieces in order, then its end token.

Attention and feed-forward parts add nothing, so the next token depends on the last one alone: an embedding
row has a 1 at the token's own place, and the head's row of a token has a 1 at the place of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.model.weights import EMBEDDING, HEAD, TensorSpec
from tests.engine.hostile import edited, written

START: Final = 0  # the prompt


def scripted(path: Path, pieces: Sequence[bytes], *, n_ctx: int = 64) -> Path:
    """Writes the model; `pieces` are tokens, so they differ, and a token may be part of a character."""
    assert len(set(pieces)) == len(pieces)
    spelled = [spelling(piece) for piece in pieces]
    texts = ("<start>", *spelled, "<end>")
    n = len(texts)
    sizes = {"embedding_length": n, "context_length": n_ctx, "block_count": 1}

    def weights(spec: TensorSpec) -> NDArray[Any]:
        if spec.name == EMBEDDING:
            return np.eye(n, dtype=np.float32)
        if spec.name == HEAD:
            return np.eye(n, k=-1, dtype=np.float32)  # row t has its 1 at t - 1
        fill = np.ones if spec.name.endswith("norm.weight") else np.zeros
        return fill(spec.shape[::-1], np.float32)

    plain = written(path.with_suffix(".plain"), "llama", sizes, texts=texts, weights=weights)
    types = np.array([3, *[1] * len(pieces), 3], np.int32)  # start and end are control tokens
    edited(plain, path, keys={"tokenizer.ggml.eos_token_id": n - 1, "tokenizer.ggml.token_type": types})
    plain.unlink()
    return path


def spelling(data: bytes) -> str:
    """How byte-level vocabularies write bytes: printable Latin-1 as it is, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(b) if b in printable else chr(0x100 + others.index(b)) for b in data)
