"""What keeps an answer within its constraint and its budget of reasoning, token by token. Layer 6.

    reasoning of at most so many tokens, </think>, then what the constraint describes, to its end

Knows tokens, no logits but those it takes away: the sampler tells it which tokens came.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.engine.constraint import Matcher
from pyggml_dflash.model.reasoning import ReasoningTracker
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.requests import ReasoningBlock

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NO_IDS: Final = np.empty(0, np.int64)
MAX_BREAKS: Final = 2  # line breaks that may stand between the closing tag and what is constrained


class AnswerGuide:
    """The rules of one answer. Used by its sampler, with every token of the answer in turn.

    No stop token comes in a block that a constraint follows, nor directly behind a block that the budget
    closed: an answer comes in any case. `finished_at`: tokens of the answer with which the constraint is met,
    so that nothing may follow; None before.
    """

    finished_at: int | None

    def __init__(self, tokenizer: Tokenizer, block: ReasoningBlock | None, matcher: Matcher | None) -> None:
        if block is not None and block.budget == 0 and not block.is_open and matcher is not None:
            block = None
        self._tokenizer, self._matcher = tokenizer, matcher
        self._tags = block
        self._block = None if block is None else ReasoningTracker(tokenizer, block)
        self._stops = np.array(sorted(tokenizer.stop_ids), np.int64)
        self._is_begun = True  # the matcher took all of the answer so far
        self._n_breaks = 0  # line breaks that may still come before what is constrained
        self._owes_text = False
        self._next: tuple[Ids | None, Ids] | None = None
        self._closing: dict[int, Ids] | None = None
        self._n_tokens = 0
        self.finished_at = None

    def allows(self, token: int) -> bool:
        """True if `token` may come next."""
        if self._only_matcher:
            return self._matcher is None or self.finished_at is not None or self._matcher.allows(token)
        only, never = self._rules()
        return token not in never if only is None else token in only

    def restrict(self, logits: Floats) -> None:
        """Take the logits F64 [n_vocab] of tokens that may not come next to -inf."""
        only, never = self._rules()
        if only is None:
            logits[never] = -np.inf
            return
        kept = logits[only]
        logits.fill(-np.inf)
        logits[only] = kept

    def accept(self, token: int) -> None:
        """Take the token that came."""
        if self.finished_at is not None:
            return
        self._n_tokens += 1
        self._next, block = None, self._block
        if block is None or block.phase == "behind":
            self._accept_content(token)
            return
        was_inside, forced = block.phase == "inside", self._is_spent
        phase = block.accept(token)
        if was_inside:
            if phase == "behind":
                self._begin_content(block.rest, forced=forced)
        elif phase == "inside":
            self._is_begun = True
            if self._matcher is not None:
                self._matcher.reset()
        else:
            self._accept_content(token)

    def _begin_content(self, rest: bytes, *, forced: bool) -> None:
        if self._matcher is None:
            self._owes_text = forced and not rest.strip()
        else:
            self._n_breaks = max(0, MAX_BREAKS - rest.count(b"\n"))

    def _accept_content(self, token: int) -> None:
        matcher = self._matcher
        if matcher is None:
            self._owes_text = self._owes_text and not self._tokenizer.answer_bytes(token).strip()
        elif self._is_begun and matcher.allows(token):
            matcher.accept(token)
            self._n_breaks = 0
            self.finished_at = self._n_tokens if matcher.finished else None
        elif self._n_breaks:
            self._n_breaks -= self._tokenizer.answer_bytes(token).count(b"\n")
        else:
            self._is_begun = False

    @property
    def _only_matcher(self) -> bool:
        """True where nothing but the matcher has a say."""
        is_behind = self._block is None or self._block.phase == "behind"
        return is_behind and not self._n_breaks and not self._owes_text

    @property
    def _is_spent(self) -> bool:
        budget = -1 if self._tags is None else self._tags.budget
        return self._block is not None and 0 <= budget <= self._block.n_tokens

    def _rules(self) -> tuple[Ids | None, Ids]:
        """The only tokens that may come next, None for all, and those that may not."""
        if self._next is None:
            self._next = self._find_rules()
        return self._next

    def _find_rules(self) -> tuple[Ids | None, Ids]:
        block, matcher, tags = self._block, self._matcher, self._tags
        if self.finished_at is not None:
            return None, NO_IDS
        if block is not None and tags is not None and block.phase == "inside":
            if self._is_spent:
                return self._next_of(tags.closes, block.closed), NO_IDS
            return None, NO_IDS if matcher is None else self._kept_inside(block.closed, tags.closes)
        if matcher is None:
            return None, self._stops if self._owes_text else NO_IDS
        allowed = [matcher.allowed() if self._is_begun else NO_IDS]
        if block is not None and tags is not None and block.phase == "opening":
            allowed.append(self._next_of(tags.opens, block.opened))
        for n in range(1, self._n_breaks + 1):
            ids = self._tokenizer.spell("\n" * n)
            allowed.append(np.array(ids[:1] if len(ids) == 1 else [], np.int64))
        return np.unique(np.concatenate(allowed)) if len(allowed) > 1 else allowed[0], NO_IDS

    def _next_of(self, tag: str, n_bytes: int) -> Ids:
        """The token that goes on with a tag of which there are `n_bytes`."""
        return np.array(self._tokenizer.spell(tag.encode()[n_bytes:].decode())[:1], np.int64)

    def _kept_inside(self, n_bytes: int, closes: str) -> Ids:
        """Tokens that would end the answer in its block, or leave it with text that the matcher does not see.

        `n_bytes`: of the closing tag, those that the block ends with.
        """
        if self._closing is None:
            self._closing = closing_ids(self._tokenizer, closes.encode())
        found = [self._stops, self._closing.get(0, NO_IDS)]
        if n_bytes:
            found.append(self._closing.get(n_bytes, NO_IDS))
        return np.concatenate(found)


def closing_ids(tokenizer: Tokenizer, tag: bytes) -> dict[int, Ids]:
    """Tokens with text behind `tag`, which they complete, by how many bytes of it must come before them."""
    found: dict[int, list[int]] = {}
    for token in range(tokenizer.n_vocab):
        data = tokenizer.answer_bytes(token)
        if tag[-1:] not in data:
            continue
        whole = data.find(tag)
        if whole >= 0 and data[whole + len(tag) :].strip():
            found.setdefault(0, []).append(token)
        for n in range(1, len(tag)):
            if data.startswith(tag[n:]) and data[len(tag) - n :].strip():
                found.setdefault(n, []).append(token)
    return {n: np.array(ids, np.int64) for n, ids in found.items()}
