"""Arguments and flags that several commands share, and the options made of them. Layer 9.

Each decorator adds flags to a command and hands it one object instead of their values: `engine`,
`sampling` or `answer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click

from dflash_cli.constraint_flags import constraint_options
from dflash_cli.device_flags import DEVICES
from dflash_cli.params import (
    ContextLength,
    DraftPath,
    Folder,
    MaxContext,
    ModelFile,
    NumberOrAuto,
    Seed,
    Text,
    TokenBias,
    TrimInterval,
    WholeNumber,
)
from dflash_cli.settings import variable
from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import (
    KV_TYPES,
    TRIM_VARIABLE,
    Auto,
    DraftCausal,
    EngineOptions,
    HostMemory,
    KVType,
    LinkType,
    MtpConvention,
    SamplingOptions,
    Spec,
    Split,
    Switch,
    check_int,
)
from pyggml_dflash.requests import Constraint, GenerationRequest

F = TypeVar("F", bound=Callable[..., Any])
Flag = Callable[[F], F]

_SWITCH: Final = click.Choice(get_args(Switch))


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


def apply(flags: Sequence[Flag[Any]], command: F) -> F:
    """`command` with the flags, in the order in which help shows them."""
    for flag in reversed(flags):
        command = flag(command)
    return command


def apply_settings(flags: Sequence[Flag[Any]], command: F) -> F:
    """`apply`, for flags that may also stand in the environment and anywhere in a configuration file."""
    command = apply(flags, command)
    added: list[click.Parameter] = vars(command)["__click_params__"][-len(flags) :]
    for param in added:
        param.envvar = variable(param)
    return command


def cache_type_flag(which: str, what: str) -> Flag[Any]:
    """`--cache-type-k` or `--cache-type-v`."""
    return click.option(
        f"--cache-type-{which}",
        type=click.Choice(KV_TYPES),
        default="f16",
        show_default=True,
        help=f"Element type of {what} in the KV cache.",
    )


def number_flag(name: str, default: float, text: str) -> Flag[Any]:
    """A flag of `SamplingOptions` that is a number."""
    return click.option(name, type=float, default=default, show_default=True, help=text)


MODEL: Final = click.argument("model", type=ModelFile(), required=False)
JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
CACHE_TYPES: Final = (cache_type_flag("k", "keys"), cache_type_flag("v", "values"))

_ENGINE: Final = (
    MODEL,
    click.option(
        "--max-ctx",
        type=MaxContext(),
        default="auto",
        show_default=True,
        help="Context in tokens, also as 32k or 1m; 'auto': the largest that fits, 'auto:N' up to N.",
    ),
    click.option(
        "--min-ctx",
        type=ContextLength(),
        help="Least context that 'auto' may choose.  [default: 4096, or 256 for models of short contexts]",
    ),
    click.option("--slots", type=WholeNumber(), default=1, show_default=True, help="Sequences at a time."),
    click.option(
        "--prefill-share",
        type=float,
        default=1.0,
        show_default=True,
        help="Most of the time that prompts may take while others are answered; 1: any, 0: none.",
    ),
    click.option(
        "--admission-coalesce-ms",
        type=WholeNumber(),
        default=0,
        show_default=True,
        help="How long an idle engine waits for more requests when one comes.",
    ),
    click.option(
        "--allow-batch-variance",
        is_flag=True,
        help="Decode slots together even where that changes how their numbers are rounded.",
    ),
    click.option(
        "--chunk",
        type=NumberOrAuto("chunk", "chunk in tokens", 512),
        default="auto",
        show_default=True,
        help="Prompt tokens of one forward, or 'auto'.",
    ),
    *DEVICES,
    click.option(
        "--fit-margin",
        default="10%",
        show_default=True,
        help="What a context leaves free: a part of what is free beside weights and state, or MiB.",
    ),
    click.option(
        "--threads", type=WholeNumber(), help="CPU threads that compute.  [default: one per physical core]"
    ),
    *CACHE_TYPES,
    click.option("--flash-attn", type=_SWITCH, default="auto", show_default=True, help="Fused attention."),
    click.option(
        "--repack",
        type=_SWITCH,
        default="auto",
        show_default=True,
        help="Copy weights into CPU layouts that compute faster.",
    ),
    click.option(
        "--draft",
        type=DraftPath(),
        help="Draft made for the model: GGUF file or published folder, or a file with its MTP block."
        "  [default: that of the shipped model]",
    ),
    click.option(
        "--draft-causal",
        type=click.Choice(get_args(DraftCausal)),
        default="auto",
        show_default=True,
        help="Layers of a DFlash draft in which a row sees no later ones: none, those with a window "
        "('swa') or all. 'auto' does what the draft says, and 'swa' if it says nothing.",
    ),
    click.option(
        "--spec",
        type=click.Choice(get_args(Spec)),
        default="auto",
        show_default=True,
        help="What drafts tokens: a draft, the model's MTP block or nothing; 'auto': the first there is.",
    ),
    click.option(
        "--spec-width",
        type=NumberOrAuto("rows", "number of rows", 4),
        default="auto",
        show_default=True,
        help="Rows of every verify forward, or 'auto' for what measured cost and acceptance say.",
    ),
    click.option(
        "--mtp-convention",
        type=click.Choice(get_args(MtpConvention)),
        default="all-streams",
        show_default=True,
        help="How a qwen4exp MTP block reads the model; changes what is accepted, never the text.",
    ),
    click.option(
        "--prefill-pool-trim-tokens",
        "trim_interval",
        type=TrimInterval(),
        help="Trim a legacy scratch pool after every N prompt tokens; 'auto': when memory runs low; 'off'."
        f"  [default: {TRIM_VARIABLE}, else off]",
    ),
    click.option(
        "--prefix-cache-max-mib",
        type=NumberOrAuto("mib", "number of MiB", 4096),
        default="auto",
        show_default=True,
        help="Most memory of stored states, which prompts continue that begin alike; 0: none. 'auto': for two"
        " per slot and one more, within a quarter of what is free; 'dflash run' stores none without"
        " --kv-cache-dir.",
    ),
    click.option(
        "--prefix-cache-entries",
        type=WholeNumber(),
        default=32,
        show_default=True,
        help="Most stored states in memory.",
    ),
    click.option(
        "--snapshot-memory",
        type=click.Choice(get_args(HostMemory)),
        default="pageable",
        show_default=True,
        help="System memory for stored states beside a GPU; pinned is copied faster.",
    ),
    click.option("--kv-cache-dir", type=Folder(), help="Folder in which stored states outlive the process."),
    click.option(
        "--kv-cache-budget",
        type=WholeNumber(),
        default=4096,
        show_default=True,
        help="Most MiB of files in --kv-cache-dir.",
    ),
    click.option(
        "--kv-cache-min-tokens",
        type=WholeNumber(),
        default=512,
        show_default=True,
        help="Fewest tokens of a state that is worth a file.",
    ),
    click.option(
        "--nfc/--no-nfc", default=True, help="Unicode NFC before tokenizing, where the model wants it."
    ),
)

_SOURCES: Final = (
    click.option(
        "--profile",
        multiple=True,
        expose_value=False,
        metavar="NAME",
        help="Take flags that nothing else sets from a profile; 'dflash profiles' lists them.",
    ),
    click.option(
        "--config",
        type=click.Path(),
        expose_value=False,
        metavar="FILE",
        help="TOML file with values of flags; 'dflash env' shows which are in force."
        "  [default: config.toml in the user's folder for configuration]",
    ),
)

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


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """MODEL and the flags of `EngineOptions`; the command receives them as `engine`."""

    @functools.wraps(command)
    def with_engine(
        *,
        model: Path | None,
        max_ctx: int | str | None,
        min_ctx: int | None,
        slots: int,
        prefill_share: float,
        admission_coalesce_ms: int,
        allow_batch_variance: bool,
        chunk: int | Auto,
        device: str | None,
        devices: tuple[str, ...],
        split: Split,
        tensor_split: tuple[float, ...],
        expert_device: str | None,
        link_type: LinkType,
        prompt_streams: int | Auto,
        kv_overflow_device: str | None,
        expert_placement: Path | None,
        expert_budget_mib: int,
        stream_experts: int | Auto,
        expert_memory: HostMemory,
        device_cap: tuple[tuple[str, int], ...],
        device_reserve_mib: int,
        fit_margin: str,
        threads: int | None,
        cache_type_k: KVType,
        cache_type_v: KVType,
        flash_attn: Switch,
        repack: Switch,
        draft: Path | None,
        draft_causal: DraftCausal,
        spec: Spec,
        spec_width: int | Auto,
        mtp_convention: MtpConvention,
        trim_interval: int | Auto | None,
        prefix_cache_max_mib: int | Auto,
        prefix_cache_entries: int,
        snapshot_memory: HostMemory,
        kv_cache_dir: Path | None,
        kv_cache_budget: int,
        kv_cache_min_tokens: int,
        nfc: bool,
        **rest: Any,
    ) -> None:
        engine = EngineOptions(
            model=model,
            max_ctx=max_ctx,
            min_ctx=min_ctx,
            slots=slots,
            prefill_share=prefill_share,
            admission_coalesce_ms=admission_coalesce_ms,
            allow_batch_variance=allow_batch_variance,
            chunk=chunk,
            device=device,
            devices=devices,
            split=split,
            tensor_split=tensor_split,
            expert_device=expert_device,
            link_type=link_type,
            prompt_streams=prompt_streams,
            kv_overflow_device=kv_overflow_device,
            expert_placement=expert_placement,
            expert_budget_mib=expert_budget_mib,
            stream_experts=stream_experts,
            expert_memory=expert_memory,
            device_cap=_by_name("--device-cap", device_cap),
            device_reserve_mib=device_reserve_mib,
            fit_margin=fit_margin,
            threads=threads,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            flash_attn=flash_attn,
            repack=repack,
            draft=draft,
            draft_causal=draft_causal,
            spec=spec,
            spec_width=spec_width,
            mtp_convention=mtp_convention,
            trim_interval=trim_interval,
            prefix_cache_max_mib=prefix_cache_max_mib,
            prefix_cache_entries=prefix_cache_entries,
            snapshot_memory=snapshot_memory,
            kv_cache_dir=kv_cache_dir,
            kv_cache_budget=kv_cache_budget,
            kv_cache_min_tokens=kv_cache_min_tokens,
            nfc=nfc,
        )
        command(engine=engine, **rest)

    return apply_settings((*_ENGINE, *_SOURCES), with_engine)


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
            logit_bias=_biases(logit_bias),
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


def _by_name(flag: str, pairs: tuple[tuple[str, int], ...]) -> dict[str, int]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{flag} names {twice} twice; give each device one")
    return found


def _biases(pairs: tuple[tuple[int, float], ...]) -> dict[int, float]:
    biases = dict(pairs)
    if len(biases) < len(pairs):
        tokens = [token for token, _ in pairs]
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise UsageError(f"--logit-bias names token {twice} twice; give each token one bias")
    return biases
