"""`dflash fit`: which context fits, and where the memory goes. Layer 9."""

from __future__ import annotations

import shlex

import click

from dflash_cli.engine_flags import engine_options
from dflash_cli.flags import JSON
from dflash_cli.streams import printable
from dflash_cli.ui import open_stdout, print_json, print_table, say
from pyggml_dflash.api import DEFAULT_MODEL, DeviceShare, FitReport, fit_report
from pyggml_dflash.errors import ContextFitError, human_bytes
from pyggml_dflash.options import EngineOptions


@click.command()
@engine_options
@JSON
@click.pass_context
def fit(ctx: click.Context, engine: EngineOptions, as_json: bool) -> None:
    """Show which context fits, and where the memory goes.

    Takes the flags of 'dflash run' and measures what they would allocate; nothing is loaded and no weight is
    read. Room for stored states is counted as 'dflash chat' needs it; --prefix-cache-max-mib 0 leaves it out.
    Exits 4 if the context asked for does not fit.
    """
    open_stdout()
    if engine.model is None:
        say(f"no MODEL given: fitting the small model that ships with the package ({DEFAULT_MODEL.name})")
    report = fit_report(engine)
    if as_json:
        print_json(report)
    else:
        print_fit(report)
    if not report.fits:
        ctx.exit(ContextFitError.exit_code)


def print_fit(report: FitReport) -> None:
    """The answer, a table per device, the search, and what other choices would get."""
    print_table(_summary_rows(report), "<<")
    for share in report.devices:
        click.echo(f"\n{share.device}")
        print_table(_share_rows(share), "<>", indent="  ")
    click.echo("\ncontexts that were tried")
    tried = [
        [
            str(p.n_ctx),
            "fits" if p.fits else "does not fit",
            f"{human_bytes(abs(p.balance))} {_side(p.balance)}",
        ]
        for p in report.trace
    ]
    print_table(tried, "><>", indent="  ")
    if report.alternatives:
        click.echo("\nlargest context by type of keys and values")
        print_table(_alternative_rows(report), "<" + ">" * len(_slot_counts(report)), indent="  ")
    if report.flags:
        click.echo(f"\nthe same without a search: {printable(shlex.join(report.flags))}")


def _side(balance: int) -> str:
    return "lack" if balance < 0 else "left"


def _summary_rows(report: FitReport) -> list[list[str]]:
    slots = "" if report.slots == 1 else f" in each of {report.slots} slots"
    found = f"{report.n_ctx} tokens{slots}" if report.fits else f"{report.requested} does not fit"
    return [
        ["model", printable(report.model.name)],
        ["context", f"{found} (trained for {report.n_ctx_train})"],
        ["chunk", f"{report.chunk} tokens"],
        ["cache", f"K {report.cache_type_k}, V {report.cache_type_v}"],
        ["drafts", report.spec],
        ["devices", printable(report.placement)],
        *([["experts", f"copied for {report.stream_rows} rows and more"]] if report.stream_rows else []),
    ]


def _share_rows(share: DeviceShare) -> list[list[str]]:
    rows = [[name, human_bytes(n)] for name, n in share.terms.items() if n]
    rows.append(["headroom", human_bytes(share.headroom)])
    rows.append(["together", human_bytes(share.required)])
    return [*rows, ["free", human_bytes(share.available)]]


def _slot_counts(report: FitReport) -> list[int]:
    return sorted({a.slots for a in report.alternatives})


def _alternative_rows(report: FitReport) -> list[list[str]]:
    counts = _slot_counts(report)
    found = {(a.cache_type, a.slots): a.n_ctx for a in report.alternatives}
    rows = [["", *(f"{n} slot{'s' if n > 1 else ''}" for n in counts)]]
    for cache_type in dict.fromkeys(a.cache_type for a in report.alternatives):
        contexts = [found.get((cache_type, n)) for n in counts]
        rows.append([cache_type, *("-" if not n else str(n) for n in contexts)])
    return rows
