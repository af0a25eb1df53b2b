"""A model that answers every conversation with one text, behind a template like those of Qwen.

Attention and feed-forward parts add nothing, so the next token depends on the last one alone: an embedding
row has a 1 at the token's own place, and the head's row of a token has a 1 at the place of the one before.
The text is cut into tokens of which no two are the same; the prompt ends with a token that the first follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash import Engine
from pyggml_dflash.model.weights import EMBEDDING, HEAD, TensorSpec
from tests.engine.hostile import edited, written
from tests.engine.scripted import spelling
from tests.engine.tiny import opened
from tests.serve.live import Live, live

BYTES: Final = tuple(spelling(bytes([byte])) for byte in range(256))
STARTS: Final = ("<start>", "<think>")  # a prompt ends with one of them
# What it writes of a conversation is easy to find in a prompt; `enable_thinking` opens a reasoning block.
TEMPLATE: Final = """\
{%- if tools %}[tools {{ tools | tojson }}]{% endif %}
{%- for m in messages %}[{{ m.role }}
{%- if m.reasoning_content %} thought {{ m.reasoning_content }}{% endif %} {{ m.content }}
{%- for call in m.tool_calls or [] %} calls {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}]{% endfor %}
{%- if add_generation_prompt %}{{ '<think>' if enable_thinking else '<start>' }}{% endif %}
{#- </think> CALLS #}"""
CALLS_MARK: Final = {"xml": "<tool_call>", "bare": ""}


def told(path: Path, answer: str | bytes, *, n_ctx: int = 2048, calls: str = "xml") -> Path:
    """Writes the model; `calls` 'bare': its template knows no envelope around calls."""
    pieces = cut(answer.encode() if isinstance(answer, str) else answer)
    texts = (*BYTES, *STARTS, *map(spelling, pieces), "<end>")
    n, first = len(texts), len(BYTES) + len(STARTS)
    sizes = {"embedding_length": n, "context_length": n_ctx, "block_count": 1}

    def weights(spec: TensorSpec) -> NDArray[Any]:
        if spec.name == EMBEDDING:
            return np.eye(n, dtype=np.float32)
        if spec.name == HEAD:
            head = np.eye(n, k=-1, dtype=np.float32)  # row t has its 1 at t - 1
            head[: first + 1] = 0
            head[first, len(BYTES) : first] = 1
            return head
        fill = np.ones if spec.name.endswith("norm.weight") else np.zeros
        return fill(spec.shape[::-1], np.float32)

    plain = written(path.with_suffix(".plain"), "llama", sizes, texts=texts, weights=weights)
    kinds = [1] * len(BYTES) + [3] * len(STARTS) + [1] * len(pieces) + [3]
    keys = {
        "tokenizer.ggml.eos_token_id": n - 1,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.chat_template": TEMPLATE.replace("CALLS", CALLS_MARK[calls]),
    }
    edited(plain, path, keys=keys)
    plain.unlink()
    return path


def cut(answer: bytes) -> list[bytes]:
    """Pieces of which no two are the same, and none is a single byte; most have three bytes."""
    pieces: list[bytes] = []
    start = 0
    while start < len(answer):
        end = min(start + 3, len(answer))
        while answer[start:end] in pieces:
            end += 1
            assert end <= len(answer), "the end of the answer has stood before"
        if len(answer) - end == 1:
            end += 1
        pieces.append(answer[start:end])
        start = end
    assert b"".join(pieces) == answer
    assert len(set(pieces)) == len(pieces)
    assert all(len(piece) > 1 for piece in pieces)
    return pieces


@contextmanager
def telling(
    folder: Path, answer: str | bytes, *, n_ctx: int = 2048, calls: str = "xml", **options: Any
) -> Iterator[Live]:
    """A server whose model answers with `answer`; a prompt has a token for each byte of it."""
    path = told(folder / "told.gguf", answer, n_ctx=n_ctx, calls=calls)
    engine: Engine
    with opened(path, max_ctx=n_ctx) as engine, live(engine, **options) as server:
        yield server
