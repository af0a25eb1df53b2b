"""`dflash chat`: a conversation in the terminal, or over a pipe. Layer 9.

Answers go to standard output, everything else to standard error. Lines that begin with '/' are commands.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import click

from dflash_cli.answer import consume, open_engine
from dflash_cli.answer_flags import AnswerOptions, answer_options, sampling_options
from dflash_cli.chat_spec import ChatDrafting
from dflash_cli.conversation import Conversation, load_conversation
from dflash_cli.engine_flags import engine_options
from dflash_cli.ui import ProgressBars, drafting_lines, open_stdout, say, timings_line
from pyggml_dflash.api import Engine
from pyggml_dflash.errors import DflashError, EngineClosed, UsageError
from pyggml_dflash.options import EngineOptions, SamplingOptions
from pyggml_dflash.requests import GenerationResult

PRESSES_TO_LEAVE: Final = 3  # of Ctrl-C during one answer; two are a double press

HELP: Final = {
    "/clear": "forget the conversation; the system message stays",
    "/regen": "answer the last message again",
    "/stats": "tokens and rates of the last answer, and the context in use",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "go on with a conversation that was saved",
    "/spec [HOW] [ROWS]": "draft by auto, off, dflash or mtp, and ROWS or auto per step; alone, show it",
    "/system TEXT": "set the system message; without TEXT, show it",
    "/help": "show this",
    "/bye": "leave, as do /exit, /quit and Ctrl-D",
}
LEAVING: Final = ("/bye", "/exit", "/quit")


@click.command()
@answer_options
@sampling_options
@engine_options
@click.option("--quiet", is_flag=True, help="No progress and notices on standard error.")
def chat(answer: AnswerOptions, sampling: SamplingOptions, engine: EngineOptions, quiet: bool) -> None:
    """Talk with a model in the terminal.

    Each line is a message; '/help' lists the commands. Ctrl-C stops an answer, and what was printed
    stays in the conversation; Ctrl-D leaves. Lines may also come from a pipe.
    """
    answer.check()
    open_stdout()
    with ProgressBars(quiet=quiet) as bars, ExitStack() as engines:
        opened = engines.enter_context(open_engine(engine, bars, quiet=quiet))
        check(opened, answer)
        if not quiet:
            info = opened.info
            name = info.name if info.spec == "off" else f"{info.name} with {info.spec}"
            say(f"{name} on {info.device}, context {info.n_ctx} tokens; /help lists the commands")
        drafting = ChatDrafting(
            opened, engine, lambda options: engines.enter_context(open_engine(options, bars, quiet=True))
        )
        session = Session(drafting, answer, sampling, bars)
        for line in read_lines():
            if not session.handle(line):
                break


def check(engine: Engine, answer: AnswerOptions) -> None:
    """Refuse at once what every message would be refused for."""
    engine.render_chat(
        [{"role": "user", "content": "-"}],
        reasoning=answer.reasoning,
        reasoning_budget=answer.reasoning_budget,
    )
    if answer.constraint is not None:
        engine.check_constraint(answer.constraint)


def read_lines() -> Iterator[str]:
    """Lines typed, with editing and history where `readline` is there, or piped in; ends at their end."""
    if sys.stdin is None:
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused with the message
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is imported)
    while True:
        try:
            if not sys.stdout.isatty():  # keep answers alone on standard output
                click.echo("> ", err=True, nl=False)
            yield input("> " if sys.stdout.isatty() else "")
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo("\n/bye or Ctrl-D leaves", err=True)


class Session:
    """One conversation with one engine, and what its lines do."""

    def __init__(
        self, drafting: ChatDrafting, answer: AnswerOptions, sampling: SamplingOptions, bars: ProgressBars
    ) -> None:
        self._drafting, self._answer, self._sampling, self._bars = drafting, answer, sampling, bars
        self._conversation = Conversation(system=answer.system)
        self._last: GenerationResult | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/regen": self._regenerate,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/spec": self._drafting.set,
            "/system": self._system,
            "/help": self._help,
        }

    def handle(self, line: str) -> bool:
        """Do what a line says; False if it says goodbye. Errors are shown, and the session goes on."""
        name, _, argument = line.strip().partition(" ")
        if name in LEAVING:
            return False
        try:
            if name in self._commands:
                self._commands[name](argument.strip())
            elif name.startswith("/"):
                raise UsageError(f"{name} is no command; there are {', '.join(HELP)}")
            elif name:
                self._say(line)
        except EngineClosed:
            raise
        except DflashError as error:
            say(f"error: {error}")
        except KeyboardInterrupt:  # before the answer began
            click.echo(err=True)
        return True

    def _say(self, text: str) -> None:
        turns = self._conversation.turns
        if self._conversation.unanswered:
            raise UsageError("the last message has no answer yet; /regen answers it, /clear starts over")
        turns.append(text)
        try:
            self._reply()
        except (DflashError, KeyboardInterrupt):
            turns.pop()  # an error leaves the conversation as it was
            raise

    def _reply(self) -> None:
        """Answer the last message; an answer that is stopped stays as far as it came."""
        answer = self._answer
        stream = self._drafting.engine.stream_chat(
            self._conversation.messages,
            reasoning=answer.reasoning,
            max_tokens=answer.max_tokens,
            sampling=self._sampling,
            stop=answer.stop,
            spec=self._drafting.spec,
            spec_width=self._drafting.width,
            constraint=answer.constraint,
            reasoning_budget=answer.reasoning_budget,
            progress=self._bars,
        )
        self._last = consume(stream, self._bars, last=PRESSES_TO_LEAVE)
        self._conversation.turns.append(self._last.text)

    def _regenerate(self, argument: str) -> None:
        turns = self._conversation.turns
        if not turns:
            raise UsageError("there is no message to answer")
        if self._sampling.greedy or self._sampling.seed is not None:
            say("the answer will be the same: give --temperature, and no --seed, for another one")
        previous = [] if self._conversation.unanswered else [turns.pop()]
        try:
            self._reply()
        except (DflashError, KeyboardInterrupt):
            turns.extend(previous)
            raise

    def _clear(self, argument: str) -> None:
        self._conversation.turns.clear()
        say("the conversation is empty")

    def _stats(self, argument: str) -> None:
        n_turns, n_ctx = len(self._conversation.turns), self._drafting.engine.info.n_ctx
        if self._last is None:
            say(f"{n_turns} messages; no answer yet; context of {n_ctx} tokens")
            return
        usage = self._last.usage
        used = usage.prompt_tokens + usage.completion_tokens
        say(f"{n_turns} messages; {used} of {n_ctx} tokens of context used by the last answer")
        say(timings_line(self._last))
        if self._last.speculation is not None:
            for line in drafting_lines(self._last.speculation):
                say(line)

    def _save(self, argument: str) -> None:
        path = _path("/save", argument)
        self._conversation.save(path)
        say(f"saved {len(self._conversation.messages)} messages to {path}")

    def _load(self, argument: str) -> None:
        path = _path("/load", argument)
        self._conversation = load_conversation(path)
        rest = "; the last one has no answer yet: /regen gives it" if self._conversation.unanswered else ""
        say(f"loaded {len(self._conversation.messages)} messages from {path}{rest}")

    def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = argument
        say(f"system message: {self._conversation.system or 'none'}")

    def _help(self, argument: str) -> None:
        for usage, meaning in HELP.items():
            click.echo(f"  {usage:20}{meaning}", err=True)


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise UsageError(f"{command} needs the name of a file")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{argument} names a home folder that is not known; write the path out") from error
