"""What a request asks of the engine. Layer 8.

The one place where request fields become arguments of `Engine.submit`: routes make a `Question`, whatever
protocol they speak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pyggml_dflash.api import AnswerParser, AsyncTextStream, Engine
from pyggml_dflash.batch import BatchRequest
from pyggml_dflash.errors import UsageError
from pyggml_dflash.openai.asks import with_seed
from pyggml_dflash.openai.forms import Calls, held_to
from pyggml_dflash.options import SamplingOptions, Spec
from pyggml_dflash.requests import Constraint, ProgressCallback, ReasoningBlock
from pyggml_dflash.serve.parts import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt in tokens, and how to answer it."""

    tokens: tuple[int, ...] = field(repr=False)
    max_tokens: int | None
    sampling: SamplingOptions
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    spec: Spec | None = None
    ignore_eos: bool = False
    continues_text: bool = False
    parser: Callable[[], AnswerParser] | None = None  # takes an answer apart; None: all of it is content
    one_call: bool = False  # the answer ends with its first call of a tool
    reasoning_block: ReasoningBlock | None = None  # what an answer may begin with
    constraint: Constraint | None = None  # what it must be, behind its reasoning
    cache_prompt: bool = True
    keep_head: bool = False  # many conversations begin with the same first turn

    @classmethod
    def of(
        cls,
        request: BatchRequest,
        tokens: Sequence[int],
        *,
        constraint: Constraint | None,
        parser: Callable[[], AnswerParser] | None = None,
        reasoning_block: ReasoningBlock | None = None,
        one_call: bool = False,
        keep_head: bool = False,
    ) -> Question:
        """What a request asks, once its prompt is tokens and what its answer is held to is compiled."""
        return cls(
            tokens=tuple(tokens),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=request.stop,
            logprobs=request.logprobs,
            spec=request.spec,
            ignore_eos=request.ignore_eos,
            continues_text=request.messages is None,
            parser=parser,
            one_call=one_call,
            reasoning_block=reasoning_block,
            constraint=constraint,
            cache_prompt=request.cache_prompt,
            keep_head=keep_head,
        )

    def reader(self, engine: Engine) -> Reader:
        """What reads one answer of the engine's."""
        parser = None if self.parser is None else self.parser()
        return Reader(parser, token_bytes=engine.token_bytes, one_call=self.one_call)

    async def submit(self, engine: Engine, progress: ProgressCallback) -> AsyncTextStream:
        """Queue it; raises what the engine refuses."""
        return await engine.submit(
            self.tokens,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            logprobs=self.logprobs,
            spec=self.spec,
            ignore_eos=self.ignore_eos,
            continues_text=self.continues_text,
            reasoning_block=self.reasoning_block,
            constraint=self.constraint,
            cache_prompt=self.cache_prompt,
            keep_head=self.keep_head,
            progress=progress,
        )

    def times(self, n: int) -> tuple[Question, ...]:
        """`n` times the same question, each with a seed of its own where one was given."""
        return tuple(replace(self, sampling=with_seed(self.sampling, i)) for i in range(n))


def check_choices(n: int, most: int) -> None:
    """Refuse a request for too many answers."""
    if n > most:
        raise UsageError(f"{n} answers are asked for; this server gives at most {most} to one request")


def chat_question(engine: Engine, request: BatchRequest, calls: Calls, *, begun: str = "") -> Question:
    """The question of a conversation. Renders, tokenizes and compiles: not for the event loop.

    `begun` is the beginning of the answer, which the model continues.
    """
    constraint = held_to(engine, calls, request.constraint)
    prompt = chat_prompt(engine, request, begun=begun)
    return Question.of(
        request,
        prompt.tokens,
        parser=prompt.parser,
        reasoning_block=prompt.reasoning_block,
        one_call=calls.one,
        constraint=constraint,
        keep_head=bool(request.tools),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as the model reads it, and what takes an answer to it apart."""

    tokens: tuple[int, ...] = field(repr=False)
    parser: Callable[[], AnswerParser]
    reasoning_block: ReasoningBlock | None


def chat_prompt(engine: Engine, request: BatchRequest, *, begun: str = "") -> ChatPrompt:
    """The prompt of a conversation, by the model's template. Takes a while: not for the event loop.

    `begun` is the beginning of the answer, which the model continues. Raises `UsageError` for tools and
    messages that cannot be used.
    """
    assert request.messages is not None
    budget = request.reasoning_budget
    rendered = engine.render_chat(
        request.messages, tools=request.tools, reasoning=request.reasoning, reasoning_budget=budget
    )
    text = rendered + begun
    parser = partial(engine.answer_parser, text, tools=request.tools)
    parser()  # refuses tools
    return ChatPrompt(
        tokens=tuple(engine.tokenize(text, add_special=False)),
        parser=parser,
        reasoning_block=engine.reasoning_block(text, budget),
    )
