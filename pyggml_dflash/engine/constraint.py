"""Constraints compiled for one model: which tokens an answer may go on with. Layer 6.

The work is llguidance's, an optional package that is imported when the first constraint is checked. Owns the
view that it has of the vocabulary, made once, and the constraints compiled last. Bounds are such that a
constraint is compiled or refused within seconds, holds some ten MiB, and cannot end the process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.engine.constraint_trial import on_deep_stack, survives
from pyggml_dflash.errors import BackendError, UsageError
from pyggml_dflash.extras import install_hint
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.requests import Constraint

if TYPE_CHECKING:
    import llguidance

LOG: Final = logging.getLogger(__name__)
N_KEPT: Final = 16  # compiled constraints
N_TRIED: Final = 10_000
# States of the lexer take up to 2 kB each. A row has four items for each optional member of an object.
LIMITS: Final[Mapping[str, Any]] = {
    "max_lexer_states": 20_000,
    "max_items_in_row": 10_000,
    "verbose_errors": False,
}
MAX_GBNF_RULES: Final = 1000  # the time of translating them grows with the square
MAX_HARMLESS_CHARS: Final = 4096
# Keys of JSON schemas that can make short ones take long.
_HEAVY: Final = re.compile(r'"(multipleOf|pattern|patternProperties|allOf|oneOf|x-guidance)"')
_OF_SOURCE: Final = re.compile(r"(\d+ \| .*|\^)?")  # lines of a message that show the source
# Space between the parts of JSON: models that may put as much as they like there may never end.
JSON_SPACE: Final = r"(?: |\n[ \t]{0,20})?"

Ids = npt.NDArray[np.int64]


class Matcher:
    """One answer's place in its constraint. `accept` the tokens of the answer in turn."""

    def __init__(self, matcher: llguidance.LLMatcher, n_vocab: int, ends: frozenset[int]) -> None:
        """`ends`: the stop tokens, which may come where the answer may end."""
        self._matcher, self._n_vocab, self._ends = matcher, n_vocab, ends
        self._bits: bytes | None = None  # of the tokens that may come next, as asked for last
        self.finished = False  # nothing can follow any more

    def allows(self, token: int) -> bool:
        """True if the answer may go on with `token`, or end with it if it is a stop token."""
        return bool(self._mask()[token >> 3] >> (token & 7) & 1)

    def allowed(self) -> Ids:
        """The ids of all tokens that it may go on with, ascending."""
        bits = np.frombuffer(self._mask(), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, count=self._n_vocab, bitorder="little"))

    def accept(self, token: int) -> None:
        """Take a token that is allowed."""
        self._bits = None
        self._matcher.consume_token(token)
        self._check()
        self.finished = self._matcher.is_stopped() or (self._matcher.is_accepting() and self._may_only_end())

    def reset(self) -> None:
        """Go back to the beginning."""
        self._bits, self.finished = None, False
        self._matcher.reset()

    def copy(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._matcher.deep_copy(), self._n_vocab, self._ends)

    def _may_only_end(self) -> bool:
        mask = self._mask()
        if len(mask) - mask.count(0) > len(self._ends):  # more bytes than there are stop tokens
            return False
        return set(self.allowed().tolist()) <= self._ends

    def _mask(self) -> bytes:
        if self._bits is None:
            self._bits = self._matcher.compute_bitmask()
            self._check()
        return self._bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"the answer's constraint cannot go on: {_reason(self._matcher.get_error())}")


class Constraints:
    """Compiles constraints over one tokenizer. Any thread may call; what it gives belongs to the caller."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._tried: set[bytes] = set()  # digests of grammars that are no danger
        self._compiled: OrderedDict[Constraint, Matcher] = OrderedDict()  # the one used last is the last

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning; `UsageError` says what is wrong with the constraint."""
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
                return self._compiled[constraint].copy()
        found = self._compile(constraint)
        with self._lock:
            self._compiled[constraint] = found
            while len(self._compiled) > N_KEPT:
                self._compiled.popitem(last=False)
            return found.copy()

    def _compile(self, constraint: Constraint) -> Matcher:
        library = _library()
        vocabulary, n_vocab = self._read_vocabulary(), self._tokenizer.n_vocab
        grammar = _grammar(library.LLMatcher, constraint)
        if not _is_harmless(constraint):
            self._try_out(constraint.kind, grammar)
        limits = library.LLParserLimits(**LIMITS)
        matcher = on_deep_stack(lambda: library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits))
        if not matcher.is_error():
            for warning in matcher.get_grammar_warnings():
                LOG.warning("%s: %s", constraint.kind, warning)
            found = Matcher(matcher, n_vocab, self._tokenizer.stop_ids)
            if not matcher.is_stopped() and (_first(matcher, n_vocab) or matcher.is_accepting()):
                return found
        message = matcher.get_error() if matcher.is_error() else "NoExtension"
        raise UsageError(f"{constraint.kind} cannot be used: {_reason(message)}")

    def _try_out(self, kind: str, grammar: str) -> None:
        """Refuse what another process does not get done with; once, since a request is compiled for again."""
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest in self._tried:
            return
        try:
            is_safe = survives(grammar, LIMITS)
        except OSError as error:
            raise BackendError(f"{kind} cannot be tried out, no process can be started: {error}") from error
        if not is_safe:
            raise UsageError(f"{kind} cannot be used: it takes too much time or memory to compile")
        with self._lock:
            if len(self._tried) >= N_TRIED:
                self._tried.clear()
            self._tried.add(digest)

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        with self._lock:  # it takes a second for a large one, and is wanted once
            if self._vocabulary is None:
                view = _VocabularyView(self._tokenizer)
                self._vocabulary = _library().LLTokenizer(view, eos_token=view.ends)
            return self._vocabulary


class _VocabularyView:
    """A tokenizer as llguidance wants to be shown one. A model without stop tokens gets one to end with."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        n_vocab = tokenizer.n_vocab
        special = {i for i in range(n_vocab) if tokenizer.is_special(i)} | tokenizer.stop_ids
        self.tokens = [tokenizer.token_bytes(i) for i in range(n_vocab)]
        self.ends = sorted(tokenizer.stop_ids)
        if not self.ends:
            self.tokens.append(b"<|end of answer|>")
            self.ends = [n_vocab]
        self.eos_token_id = self.ends[0]
        self.special_token_ids = sorted({*special, *self.ends})

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        try:
            return self._tokenizer.spell(text, parse_special=False)
        except UsageError:  # then it is not chosen
            return []


def _is_harmless(constraint: Constraint) -> bool:
    """True for what surely compiles in no time, as most schemas do; a trial takes some tenths of a second."""
    if constraint.kind == "json_object":
        return True
    is_short = constraint.kind == "json_schema" and len(constraint.text) <= MAX_HARMLESS_CHARS
    return is_short and not _HEAVY.search(json.dumps(_read_schema(constraint.text)))


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            f"constraints need the package llguidance; install it with: {install_hint('serve')}"
        ) from error
    return llguidance


def _grammar(compiler: type[llguidance.LLMatcher], constraint: Constraint) -> str:
    """The constraint in llguidance's own form."""
    kind, text = constraint.kind, constraint.text
    if kind == "regex":
        return compiler.grammar_from_regex(text)
    if kind == "grammar":
        return compiler.grammar_from_lark(_lark(text))
    schema = {"type": "object"} if kind == "json_object" else _read_schema(text)
    try:
        return compiler.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_SPACE})
    except ValueError as error:
        raise UsageError(f"{kind} cannot be used: {_reason(str(error))}") from error


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"json_schema is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"json_schema is {text[:60]!r}; it must be an object")
    return schema


def _lark(text: str) -> str:
    from llguidance import gbnf_to_lark

    if gbnf_to_lark.is_lark_syntax(text):
        return text
    n_rules = text.count("::=")
    if n_rules > MAX_GBNF_RULES:
        raise UsageError(
            f"grammar has {n_rules} GBNF rules; at most {MAX_GBNF_RULES} are read; write it in Lark"
        )
    try:
        return gbnf_to_lark.gbnf_to_lark(text)
    except Exception as error:  # the library raises no class of its own
        raise UsageError(
            f"grammar is neither Lark, which has a rule 'start:', nor GBNF: {_reason(str(error))}"
        ) from error


def _reason(message: str) -> str:
    """What llguidance says, without what it adds for its own developers, as one line."""
    if "NoExtension" in message:
        return "there is no text that it describes"
    lines = [line.strip() for line in re.split("<state>|<backtrace>", message)[0].splitlines()]
    shown = " ".join(line for line in lines if not _OF_SOURCE.fullmatch(line))
    return shown if len(shown) <= 300 else shown[:297] + "..."


def _first(matcher: llguidance.LLMatcher, n_vocab: int) -> bool:
    """True if there is a token to begin with; finds what is too much for the limits at once, too."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return not matcher.is_error() and bool(np.unpackbits(bits, count=n_vocab, bitorder="little").any())
