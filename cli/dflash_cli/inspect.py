"""`dflash inspect`: what is in a GGUF file and what it takes to run it. Layer 9."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_cli.engine_flags import CACHE_TYPES
from dflash_cli.flags import JSON, MODEL
from dflash_cli.params import ContextLength
from dflash_cli.streams import printable
from dflash_cli.ui import open_stdout, plain, print_json, print_table, say
from pyggml_dflash.api import DEFAULT_MODEL, ModelReport, TensorShare, inspect_model
from pyggml_dflash.errors import human_bytes
from pyggml_dflash.options import KVType


@click.command()
@MODEL
@click.option(
    "--ctx",
    type=ContextLength(),
    help="Show the memory of this context, also as 32k or 1m.  [default: the trained one, at most 8192]",
)
@CACHE_TYPES[0]
@CACHE_TYPES[1]
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--metadata", is_flag=True, help="List every metadata key.")
@JSON
def inspect(
    model: Path | None,
    ctx: int | None,
    cache_type_k: KVType,
    cache_type_v: KVType,
    tensors: bool,
    metadata: bool,
    as_json: bool,
) -> None:
    """Show what is in a GGUF file and what it takes to run it.

    Works for files of architectures that are not supported, too. Only the header is read.
    """
    open_stdout()
    if model is None:
        say(f"no MODEL given: showing the small model that ships with the package ({DEFAULT_MODEL.name})")
    report = inspect_model(
        model or DEFAULT_MODEL, n_ctx=ctx, cache_type_k=cache_type_k, cache_type_v=cache_type_v
    )
    if as_json:
        hidden = {name for name, shown in (("tensors", tensors), ("metadata", metadata)) if not shown}
        print_json({name: value for name, value in plain(report).items() if name not in hidden})
    else:
        print_report(report, tensors=tensors, metadata=metadata)


def print_report(report: ModelReport, *, tensors: bool, metadata: bool) -> None:
    """Sections of plain tables."""
    print_table(_summary_rows(report), "<<")
    _print_shares("bytes by kind", report.kinds, report.n_params)
    _print_shares("bytes by element type", report.types, report.n_params)
    if report.state is not None:
        state = report.state
        rows = [
            ["KV cache", human_bytes(state.kv_bytes)],
            ["recurrent state", human_bytes(state.recurrent_bytes)],
            ["together", human_bytes(state.n_bytes)],
        ]
        types = f"K {state.cache_type_k}, V {state.cache_type_v}"
        click.echo(f"\nstate of a slot with a context of {state.n_ctx} tokens ({types})")
        print_table(rows, "<>", indent="  ")
    if metadata:
        click.echo("\nmetadata")
        print_table(
            [[printable(k), printable(str(v))] for k, v in report.metadata.items()], "<<", indent="  "
        )
    if tensors:
        click.echo("\ntensors")
        listed = [[printable(t.name), t.type, " x ".join(map(str, t.shape)), t.kind] for t in report.tensors]
        print_table([["name", "type", "shape", "kind"], *listed], "<<<<", indent="  ")


def _summary_rows(report: ModelReport) -> list[list[str]]:
    files = "" if report.n_files == 1 else f" in {report.n_files} files"
    rows = [
        ["file", printable(str(report.path))],
        ["name", printable(report.name)],
        ["architecture", printable(report.architecture) or "not given"],
        ["supported", "yes" if report.supported else f"no: {printable(report.reason or '')}"],
        ["size", f"{human_bytes(report.n_bytes)}{files}, GGUF version {report.gguf_version}"],
        ["parameters", f"{report.n_params:,} in {len(report.tensors)} tensors"],
    ]
    sizes = report.sizes
    if sizes is None:
        return rows
    drafts = f", {sizes.n_draft_layer} draft" if sizes.n_draft_layer else ""
    rows += [
        ["layers", f"{sizes.n_layer} ({sizes.n_attention_layer} with attention){drafts}"],
        ["width", f"{sizes.n_embd}, heads {sizes.n_head} of {sizes.head_dim}, KV heads {sizes.n_head_kv}"],
        ["vocabulary", f"{sizes.n_vocab} tokens"],
        ["trained context", f"{sizes.n_ctx_train} tokens"],
    ]
    if not any(share.name == "head" for share in report.kinds):
        rows.append(["head", "the embedding table (tied)"])
    if sizes.n_expert:
        rows.append(["experts", f"{sizes.n_expert}, {sizes.n_expert_used} used per token"])
    return rows


def _print_shares(title: str, shares: tuple[TensorShare, ...], n_params: int) -> None:
    click.echo(f"\n{title}")
    total = sum(share.n_bytes for share in shares)
    rows = [["", "bytes", "share", "tensors", "parameters"]]
    for share in shares:
        part = f"{100 * share.n_bytes / total:.1f}%"
        rows.append(
            [share.name, human_bytes(share.n_bytes), part, str(share.n_tensors), f"{share.n_params:,}"]
        )
    n_tensors = sum(share.n_tensors for share in shares)
    rows.append(["together", human_bytes(total), "", str(n_tensors), f"{n_params:,}"])
    print_table(rows, "<>>>>", indent="  ")
