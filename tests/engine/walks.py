"""Answers that a constraint allows, chosen by dice: what a model without sense would write."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pyggml_dflash.engine.constraint import Matcher
from pyggml_dflash.model.tokenizer import Tokenizer

MAX_TOKENS = 400


def walk(matcher: Matcher, tokenizer: Tokenizer, seed: int, *, phrases: Sequence[str] = ()) -> str | None:
    """A whole text that the constraint describes; None if it came to no end.

    Ends of strings, lists and texts are preferred, or few would. `phrases` are tried now and then.
    """
    dice = random.Random(seed)
    tokens: list[int] = []
    while not matcher.finished and len(tokens) < MAX_TOKENS:
        for token in tokenizer.spell(dice.choice(phrases)) if phrases and dice.random() < 0.4 else ():
            if not matcher.finished and matcher.allows(token):
                matcher.accept(token)
                tokens.append(token)
        if matcher.finished:
            break
        allowed = matcher.allowed().tolist()
        if dice.random() < 0.5 and set(allowed) & tokenizer.stop_ids:
            break
        going_on = [token for token in allowed if token not in tokenizer.stop_ids]
        closing = [token for token in going_on if tokenizer.token_bytes(token)[:1] in b'"}]\n<']
        token = dice.choice(closing if closing and dice.random() < 0.6 else going_on)
        assert matcher.allows(token)
        matcher.accept(token)
        tokens.append(token)
    else:
        return None if not matcher.finished else tokenizer.decode(tokens, continuation=True)
    return tokenizer.decode(tokens, continuation=True)
