"""`dflash run`: one prompt, one answer. Layer 9."""

from __future__ import annotations

from typing import Any, Final

import click

from dflash_cli.answer import consume, open_engine, without_states
from dflash_cli.answer_flags import AnswerOptions, answer_options, sampling_options
from dflash_cli.engine_flags import engine_options
from dflash_cli.flags import JSON
from dflash_cli.main import INTERRUPTED
from dflash_cli.params import WholeNumber
from dflash_cli.prompt import Prompt, PromptSource, prompt_options
from dflash_cli.ui import ProgressBars, open_stdout, plain, print_json, say, timings_line
from pyggml_dflash.api import Engine, TextStream
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import EngineOptions, SamplingOptions
from pyggml_dflash.requests import GenerationResult, TokenLogprob

STORY: Final = "Tell me a story about a shy fox."


@click.command()
@prompt_options
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@answer_options
@sampling_options
@engine_options
@JSON
@click.option("--logprobs", type=WholeNumber(), help="With --json: report each token's N best alternatives.")
@click.option("--quiet", is_flag=True, help="No progress, notices and timings on standard error.")
@click.pass_context
def run(
    ctx: click.Context,
    source: PromptSource,
    answer: AnswerOptions,
    sampling: SamplingOptions,
    engine: EngineOptions,
    raw: bool,
    as_json: bool,
    logprobs: int | None,
    quiet: bool,
) -> None:
    """Generate text from a prompt and stream it to standard output.

    The prompt is one user turn of the model's chat template; the last line break of a file or a pipe is
    not part of it. A model without a template continues the text. Without MODEL the small model that
    ships with the package is used, and tells a story if there is no prompt either. Ctrl-C stops the
    answer and keeps what was printed.
    """
    check_flags(answer, raw=raw, as_json=as_json, logprobs=logprobs)
    prompt = choose_prompt(source, engine)
    engine = without_states(engine)
    open_stdout()
    with ProgressBars(quiet=quiet) as bars, open_engine(engine, bars, quiet=quiet) as opened:
        if not raw and not opened.info.has_chat_template and answer.system is None:
            raw = True
            if not quiet:
                say("the model has no chat template: the text is continued as with --raw")
        stream = start(opened, prompt, answer, sampling, raw, logprobs, bars)
        result = consume(stream, bars, show=not as_json)
        if as_json:
            print_json(report(opened, result))
    if not quiet:
        say(timings_line(result))
    if result.finish_reason == "cancelled":
        ctx.exit(INTERRUPTED)


def choose_prompt(source: PromptSource, engine: EngineOptions) -> Prompt:
    """The prompt given, or the story that shows the shipped model at work."""
    prompt = source.read()
    if prompt is not None:
        return prompt
    if engine.model is not None:
        raise UsageError("no prompt; give one with -p TEXT, -f FILE or through a pipe")
    return Prompt(STORY, True)


def check_flags(answer: AnswerOptions, *, raw: bool, as_json: bool, logprobs: int | None) -> None:
    """Refuse values, and flags that would have no effect together, before a model is loaded."""
    answer.check(logprobs=logprobs)
    answer.check_template(raw=raw)
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json to be shown")


def start(
    engine: Engine,
    prompt: Prompt,
    answer: AnswerOptions,
    sampling: SamplingOptions,
    raw: bool,
    logprobs: int | None,
    bars: ProgressBars,
) -> TextStream:
    """Submit the prompt, as it is or as a conversation of one turn."""
    if raw:
        return engine.stream(
            prompt.text,
            max_tokens=answer.max_tokens,
            sampling=sampling,
            stop=answer.stop,
            logprobs=logprobs,
            constraint=answer.constraint,
            progress=bars,
        )
    system = [] if answer.system is None else [{"role": "system", "content": answer.system}]
    return engine.stream_chat(
        [*system, {"role": "user", "content": prompt.turn}],
        reasoning=answer.reasoning,
        max_tokens=answer.max_tokens,
        sampling=sampling,
        stop=answer.stop,
        logprobs=logprobs,
        constraint=answer.constraint,
        reasoning_budget=answer.reasoning_budget,
        progress=bars,
    )


def report(engine: Engine, result: GenerationResult) -> dict[str, Any]:
    """The answer and how it came about, for scripts."""
    info = engine.info
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "usage": result.usage,
        "timings": result.timings,
        "seed": result.seed,
        "model": info.name,
        "architecture": info.architecture,
        "device": info.device,
        "threads": info.threads,
        "n_ctx": info.n_ctx,
        "chunk": info.chunk,
        "spec": info.spec,
        "draft": info.draft,
        "speculation": speculation(result),
        "plain_reason": result.plain_reason,
        "reuse": result.reuse,
        "logprobs": [describe(engine, token) for token in result.logprobs],
    }


def speculation(result: GenerationResult) -> dict[str, Any] | None:
    """What drafting did, with the figure that everybody asks for; None if nothing drafts."""
    spec = result.speculation
    return None if spec is None else {"acceptance_length": spec.acceptance_length, **plain(spec)}


def describe(engine: Engine, token: TokenLogprob) -> dict[str, Any]:
    """A token's log-probability with texts; a part of a character shows as U+FFFD."""
    return {
        "token": token.token,
        "text": engine.detokenize([token.token], skip_special=False),
        "logprob": token.logprob,
        "top": [
            {"token": other, "text": engine.detokenize([other], skip_special=False), "logprob": logprob}
            for other, logprob in token.top
        ],
    }
