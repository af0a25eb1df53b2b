"""Where in its reasoning block an answer is, token by token. Layer 2.

Tags are found in the text, as whoever reads the answer finds them, however tokens divide them. Knows bytes
of tokens, no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.requests import ReasoningBlock

Phase = Literal["opening", "inside", "behind"]


class ReasoningTracker:
    """Follows one answer; `accept` every token.

    `phase`: 'opening' while the answer may still be about to open the block, 'behind' also if it has none.
    `n_tokens`: those of the block so far. Those of its tags are not counted, but a tag that is not yet
    complete is.
    """

    phase: Phase
    n_tokens: int

    def __init__(self, tokenizer: Tokenizer, block: ReasoningBlock) -> None:
        self._bytes = tokenizer.answer_bytes
        self._opens, self._closes = block.opens.encode(), block.closes.encode()
        self.phase = "inside" if block.is_open else "opening"
        self.n_tokens = 0
        self.rest = b""  # what the token that closed the block has behind the tag
        self._text = b""  # the beginning of the answer, or what the closing tag may begin in
        self._n_bytes = 0  # of the block
        self._starts: list[int] = []  # in the block, of the tokens that `_text` has parts of

    def accept(self, token: int) -> Phase:
        """Take the next token; the phase behind it."""
        if self.phase == "inside":
            data = self._bytes(token)
            self.n_tokens += 1
            if data:
                self._starts.append(self._n_bytes)
                self._read(data)
        elif self.phase == "opening":
            self._open(self._bytes(token))
        return self.phase

    @property
    def opened(self) -> int:
        """Bytes of the opening tag that the answer has so far, while it is 'opening'."""
        return len(self._text)

    @property
    def closed(self) -> int:
        """Bytes of the closing tag that the block may have ended with, while it is 'inside'."""
        most = min(len(self._text), len(self._closes) - 1)
        return next((n for n in range(most, 0, -1) if self._text.endswith(self._closes[:n])), 0)

    def _open(self, data: bytes) -> None:
        self._text = (self._text + data).lstrip()
        if self._text.startswith(self._opens):
            self.phase = "inside"
            data, self._text = self._text[len(self._opens) :], b""
            if data:
                self.n_tokens, self._starts = 1, [0]
                self._read(data)
        elif not self._opens.startswith(self._text):
            self.phase = "behind"

    def _read(self, data: bytes) -> None:
        text, n_closes = self._text + data, len(self._closes)
        self._n_bytes += len(data)
        first = self._n_bytes - len(text)
        found = text.find(self._closes)
        if found >= 0:
            self.phase, self.rest = "behind", text[found + n_closes :]
            self.n_tokens -= sum(start >= first + found for start in self._starts)
            return
        self._text = text[-(n_closes - 1) :] if n_closes > 1 else b""
        kept = self._n_bytes - len(self._text)
        self._starts = [start for start in self._starts if start >= kept]


def count_reasoning(tokenizer: Tokenizer, block: ReasoningBlock | None, tokens: Sequence[int]) -> int:
    """How many tokens of a whole answer are reasoning, between its tags."""
    if block is None:
        return 0
    tracker = ReasoningTracker(tokenizer, block)
    for token in tokens:
        if tracker.accept(token) == "behind":
            break
    return tracker.n_tokens
