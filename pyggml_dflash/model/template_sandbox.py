"""Where chat templates run: code from model files, which must end and must not take all memory. Layer 2.

Jinja's sandbox keeps a template away from Python's objects. This one bounds its work, too: every round of a
loop and every call looks at the time, and what makes a text grow looks at its length. A single operation is
not interrupted, so a format with a huge width or a replacement still takes the memory of one such text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pyggml_dflash.errors import UsageError
from pyggml_dflash.model.tokenizer import MAX_TEXT_CHARS

RENDER_S: Final = 10.0  # of a processor, for one conversation; long ones take some tenths of a second
MAX_WRITTEN_CHARS: Final = 8 * MAX_TEXT_CHARS  # what a macro or a block writes counts where it is shown, too
MAX_NUMBER_BITS: Final = 4096
MAX_BASE: Final = 2**32
MAX_EXPONENT: Final = 64
MAX_COUNT: Final = 100_000  # columns or items that a filter or a method is to make; Jinja's limit of ranges
_COUNTING: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})  # methods of texts
_COUNTING_FILTERS: Final = ("batch", "center", "indent", "slice")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment for templates; the work of each is bounded inside `bounded`, on any thread."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        """`options` are Jinja's."""
        # Without `optimized` nothing runs when a template is compiled.
        super().__init__(finalize=self._shown, optimized=False, **options)
        self._left = threading.local()
        del self.globals["lipsum"]
        for name in _COUNTING_FILTERS:
            self.filters[name] = counted(self.filters[name])

    def template(self, source: str) -> jinja2.Template:
        """Compile a template; raises what Jinja raises."""
        return self.from_string(_Bounds().visit(self.parse(source)))

    def variables_of(self, source: str) -> frozenset[str]:
        """The names that a template reads and does not set; raises what Jinja raises."""
        finder = meta.TrackingCodeGenerator(self)
        finder.optimizer = None  # or constant expressions run here, without bounds
        finder.visit(self.parse(source))
        return frozenset(finder.undeclared_identifiers)

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Templates that run on this thread while this is open share the bounds of one conversation."""
        self._left.end_s, self._left.n_chars = time.thread_time() + RENDER_S, MAX_WRITTEN_CHARS
        try:
            yield
        finally:
            del self._left.end_s, self._left.n_chars

    def tick(self, n_chars: int = 0) -> None:
        """Count what is written; `UsageError` once it is too much, or the time is over."""
        if time.thread_time() > self._left.end_s:
            raise UsageError(f"the chat template does not end; it may take {RENDER_S:.0f} s")
        self._left.n_chars -= n_chars
        if self._left.n_chars < 0:
            raise UsageError(f"the chat template writes more than {MAX_WRITTEN_CHARS} characters")

    def joined(self, *parts: Any) -> str:
        """The texts of `parts` behind one another, as `~` gives them."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:
        """Call something for a template."""
        self.tick()
        if getattr(function, "__name__", "") in _COUNTING:
            _check_counts([*args, *options.values()])
        return super().call(context, function, *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What an operator gives, if that is not too much."""
        if operator == "**" and not (abs(left) <= MAX_BASE and abs(right) <= MAX_EXPONENT):
            problem = f"a power is of more than {MAX_BASE} or to more than {MAX_EXPONENT}"
            raise jinja2.TemplateRuntimeError(problem)
        if operator == "*":
            _check_product(left, right)
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, type(left)):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    @jinja2.pass_context
    def _shown(self, _: Context, value: Any) -> Any:
        """What `{{ value }}` shows; Jinja calls this with each."""
        self.tick(len(value) if isinstance(value, str) else 0)
        return value


class _Bounds(NodeTransformer):
    """Lets loops and macros look at the time, and `~` at lengths."""

    def visit(self, node: nodes.Node, *_: Any, **__: Any) -> Any:
        """What stands in the place of `node`."""
        new = self.generic_visit(node)
        if isinstance(new, nodes.Concat):
            return _called("joined", new.nodes, new.lineno)
        if isinstance(new, (nodes.For, nodes.Macro, nodes.CallBlock)):
            n_chars = sum(len(text.data) for text in new.find_all(nodes.TemplateData))
            tick = _called("tick", [nodes.Const(n_chars, lineno=new.lineno)], new.lineno)
            new.body.insert(0, nodes.ExprStmt(tick, lineno=new.lineno))
        return new


def _called(method: str, args: Sequence[nodes.Expr], line: int) -> nodes.Call:
    """A call of the sandbox's own method, which a template cannot name."""
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, list(args), [], None, None, lineno=line)


def counted(function: Any) -> Any:
    """A filter that refuses to make too many of something."""

    def checked(*args: Any, **options: Any) -> Any:
        _check_counts([*args[1:], *options.values()])
        return function(*args, **options)

    vars(checked).update(vars(function))  # whether it wants the environment
    return checked


def _check_counts(values: Sequence[Any]) -> None:
    if any(isinstance(value, int) and value > MAX_COUNT for value in values):
        raise jinja2.TemplateRuntimeError(f"more than {MAX_COUNT} columns or items are asked for")


def _check_length(n: int) -> None:
    if n > MAX_TEXT_CHARS:
        problem = f"a text or a list is longer than {MAX_TEXT_CHARS} characters or items"
        raise jinja2.TemplateRuntimeError(problem)


def _check_product(left: Any, right: Any) -> None:
    size, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(size, (str, list, tuple)):
        _check_length(len(size) * max(times, 0))
    are_whole = isinstance(size, int) and isinstance(times, int)
    if are_whole and size.bit_length() + times.bit_length() > MAX_NUMBER_BITS:
        raise jinja2.TemplateRuntimeError(f"a product has more than {MAX_NUMBER_BITS} bits")
