"""The command group: finds commands, and turns errors into one line and an exit code. Layer 9.

A command's module is imported when it is called, so that `dflash --help` stays fast; the short texts of
the overview stand here for that reason, and a test holds them against the commands.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import click

from dflash_cli.settings import META, elsewhere, named_in, resolve
from dflash_cli.streams import guard_streams, printable
from pyggml_dflash import __version__
from pyggml_dflash.errors import DflashError

INTERRUPTED: Final = 130

COMMANDS: Final = {
    "run": "Generate text from a prompt and stream it to standard output.",
    "chat": "Talk with a model in the terminal.",
    "batch": "Answer every line of a file, and write one record for each.",
    "fit": "Show which context fits, and where the memory goes.",
    "inspect": "Show what is in a GGUF file and what it takes to run it.",
    "convert-draft": "Write a DFlash draft as a GGUF file, which llama.cpp reads as well.",
    "serve": "Serve a model over HTTP, as OpenAI's and Anthropic's clients expect it.",
    "score": "Show how likely a text is under a model, token by token.",
    "route-stats": "Count which experts a model picks while it reads a text.",
    "rpc-worker": "Compute for an engine elsewhere, until interrupted.",
    "devices": "List the devices that this build can compute on.",
    "profiles": "List the profiles that --profile takes.",
    "env": "Show the values of a command's settings, and where each comes from.",
    "doctor": "Check the installation and say how to mend it.",
    "version": "Show versions of the package, its build and its requirements.",
}


class DflashGroup(click.Group):
    """Commands by name, imported when called. The one place where errors become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order of the overview."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of that name, '_' for '-'; the command in it has the same name."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"dflash_cli.{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A command by its name, with what a profile and a configuration file say as its defaults."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None and not ctx.resilient_parsing:
            settings = ctx.meta[META] = resolve(ctx, name, command, rest)
            ctx.default_map = {name: settings.default_map}
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The overview, without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except DflashError as error:
            where = named_in(error, ctx)
            text = " ".join(str(error).split()) + (f" ({where})" if where else "")
            click.echo(f"dflash: error: {printable(text)}", err=True)
            ctx.exit(error.exit_code)
        except click.BadParameter as error:
            where = elsewhere(error.ctx, error.param.name if error.param else None)
            if where is None:
                raise
            text = f"{error.message} It comes from {where}."
            raise click.BadParameter(text, error.ctx, error.param, error.param_hint) from error
        except (KeyboardInterrupt, RuntimeError) as error:
            # Before Python 3.12 an interrupt of a class that is being made, as of an import, is wrapped.
            if not isinstance(error, KeyboardInterrupt) and not isinstance(
                error.__cause__, KeyboardInterrupt
            ):
                raise
            click.echo(err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            ctx.exit(0)  # the reader of standard output is gone, which is its right (`| head`)


@click.command(cls=DflashGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash", message="%(prog)s %(version)s")
def cli() -> None:
    """Run GGUF language models on ggml.

    Exit codes: 0 done; 1 failure while running; 2 a value was refused; 3 a model file is missing, damaged
    or not supported; 4 it does not fit, the message says what would; 5 a batch has failed lines; 130
    interrupted.
    """


def main() -> None:
    """Entry point of `dflash`, `pyggml-dflash` and `python -m pyggml_dflash`."""
    guard_streams()
    cli(prog_name="dflash")
