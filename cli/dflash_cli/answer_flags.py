"""Flags that say how tokens are chosen and what an answer is, and the options made of them. Layer 9.

A decorator adds flags to a command and hands it one object instead of their values: `sampling`, `answer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import click
from click.core import ParameterSource

from dflash_cli.constraint_flags import constraint_options
from dflash_cli.flags import Flag, apply, apply_settings, each_once
from dflash_cli.params import Seed, Text, TokenBias, WholeNumber
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import SamplingOptions, check_int
from pyggml_dflash.requests import Constraint, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What an answer begins with and where it ends."""

    system: str | None
    reasoning: bool | None  # None: the template's default
    stop: tuple[str, ...]
    max_tokens: int | None  # None: up to the end of the context
    constraint: Constraint | None  # what it must be, behind its reasoning
    reasoning_budget: int  # most tokens of reasoning; -1: any number

    def check(self, *, logprobs: int | None = None) -> None:
        """Raise `UsageError` for what a request with these would be refused for."""
        GenerationRequest(tokens=(0,), max_tokens=self.max_tokens, stop=self.stop, logprobs=logprobs)
        if self.reasoning and self.reasoning_budget == 0:
            raise UsageError("--reasoning contradicts --reasoning-budget 0; give one")

    def check_template(self, *, raw: bool) -> None:
        """Raise `UsageError` for what works through the chat template, if `raw` leaves it out."""
        templated = {
            "--system": self.system is not None,
            "--reasoning": self.reasoning is not None,
            "--reasoning-budget": self.reasoning_budget != -1,
        }
        flag = next((flag for flag, is_given in templated.items() if is_given), None)
        if raw and flag is not None:
            raise UsageError(f"{flag} works through the chat template, which --raw leaves out")
        ctx = click.get_current_context()
        if raw and ctx.get_parameter_source("chat_template") is ParameterSource.COMMANDLINE:
            raise UsageError("--chat-template-file gives the chat template, which --raw leaves out")


def number_flag(name: str, default: float, text: str) -> Flag[Any]:
    """A flag of `SamplingOptions` that is a number."""
    return click.option(name, type=float, default=default, show_default=True, help=text)


_SAMPLING: Final = (
    number_flag("--temperature", 0.0, "0 takes the best token."),
    click.option(
        "--top-k", type=WholeNumber(), default=0, show_default=True, help="Keep the K best tokens; 0: all."
    ),
    number_flag("--top-p", 1.0, "Keep the best tokens up to this probability; 1: all."),
    number_flag("--min-p", 0.0, "Drop tokens below this part of the best one's probability; 0: none."),
    number_flag("--repetition-penalty", 1.0, "Weaken tokens of prompt and answer; 1: off."),
    number_flag("--frequency-penalty", 0.0, "Weaken a token each time the answer has it; 0: off."),
    number_flag("--presence-penalty", 0.0, "Weaken tokens that the answer has; 0: off."),
    click.option("--logit-bias", type=TokenBias(), multiple=True, help="Add to a token's logit; repeatable."),
    click.option(
        "--seed", type=Seed(), help="Seed of sampling: same seed, same text.  [default: a fresh one]"
    ),
)

_ANSWER: Final = (
    click.option("--system", type=Text(), help="System message in front of the conversation."),
    click.option("--reasoning/--no-reasoning", default=None, help="Let the model think first, if it can."),
    click.option("--stop", type=Text(), multiple=True, help="End the answer before this text; repeatable."),
    click.option(
        "-n",
        "--max-tokens",
        type=WholeNumber(),
        help="Most tokens of an answer.  [default: up to the end of the context]",
    ),
)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags of `SamplingOptions`; the command receives them as `sampling`."""

    @functools.wraps(command)
    def with_sampling(
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        logit_bias: tuple[tuple[int, float], ...],
        seed: int | None,
        **rest: Any,
    ) -> None:
        sampling = SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=each_once("--logit-bias", "token", logit_bias),
            seed=seed,
        )
        command(sampling=sampling, **rest)

    return apply_settings(_SAMPLING, with_sampling)


def answer_options(command: Callable[..., None]) -> Callable[..., None]:
    """System message, reasoning, stop strings, length and constraint, as `answer`."""

    @functools.wraps(command)
    def with_answer(
        *,
        system: str | None,
        reasoning: bool | None,
        stop: tuple[str, ...],
        max_tokens: int | None,
        constraint: Constraint | None,
        reasoning_budget: int,
        **rest: Any,
    ) -> None:
        check_int("reasoning_budget", reasoning_budget, -1)
        answer = AnswerOptions(
            system=system,
            reasoning=reasoning,
            stop=stop,
            max_tokens=max_tokens,
            constraint=constraint,
            reasoning_budget=reasoning_budget,
        )
        command(answer=answer, **rest)

    return apply(_ANSWER, constraint_options(with_answer))
