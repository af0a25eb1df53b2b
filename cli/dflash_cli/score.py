"""`dflash score`: how likely a text is under a model. Layer 9."""

from __future__ import annotations

import math

import click

from dflash_cli.answer import open_engine, without_states
from dflash_cli.engine_flags import engine_options
from dflash_cli.flags import JSON
from dflash_cli.prompt import PromptSource, prompt_options
from dflash_cli.run import describe
from dflash_cli.ui import ProgressBars, open_stdout, print_json, print_table
from pyggml_dflash.api import Engine, Score
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import EngineOptions


@click.command()
@prompt_options
@click.option(
    "--top",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="Alternatives to show for each token.",
)
@engine_options
@JSON
@click.option("--quiet", is_flag=True, help="No progress and notices on standard error.")
def score(source: PromptSource, top: int, engine: EngineOptions, as_json: bool, quiet: bool) -> None:
    """Show how likely a text is under a model, token by token.

    The text is taken as it is, without the chat template. Each line has a token, the natural logarithm
    of its probability given what precedes it, and that probability. The first token has none.
    """
    prompt = source.read()
    if prompt is None:
        raise UsageError("no text to score; give one with -p TEXT, -f FILE or through a pipe")
    open_stdout()
    with ProgressBars(quiet=quiet) as bars, open_engine(without_states(engine), bars, quiet=quiet) as opened:
        result = opened.score(prompt.text, top=top)
        if as_json:
            print_json(
                {
                    "model": opened.info.name,
                    "n_tokens": len(result.tokens),
                    "logprob": result.logprob,
                    "perplexity": result.perplexity,
                    "first_token": result.tokens[0],
                    "tokens": [describe(opened, token) for token in result.logprobs],
                }
            )
        else:
            print_score(opened, result)


def print_score(engine: Engine, result: Score) -> None:
    """A table of tokens, then the sum."""
    best_of = "best alternatives" if any(token.top for token in result.logprobs) else ""
    rows = [["token", "logprob", "prob", "text", best_of]]
    rows.append([str(result.tokens[0]), "-", "-", _text(engine, result.tokens[0]), ""])
    for token in result.logprobs:
        best = "  ".join(f"{_text(engine, other)} {math.exp(logprob):.3f}" for other, logprob in token.top)
        probability = f"{math.exp(token.logprob):.4f}"
        rows.append([str(token.token), f"{token.logprob:.4f}", probability, _text(engine, token.token), best])
    print_table(rows, ">>><<")
    sums = f"log-probability {result.logprob:.4f}, perplexity {result.perplexity:.4f}"
    click.echo(f"\n{len(result.tokens)} tokens, {sums}")


def _text(engine: Engine, token: int) -> str:
    return repr(engine.detokenize([token], skip_special=False))
