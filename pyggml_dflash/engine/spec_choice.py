"""Which drafter an engine gets. Layer 6.

What a user names is used or refused. What 'auto' finds by itself, the shipped model's draft or an MTP
block, is used where it can be; otherwise the engine decodes plainly and says why. Options that were given
and that nothing reads are told here as well.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pyggml_dflash.arch.qwen4exp.mtp import StreamMtpBlock
from pyggml_dflash.engine.drafter_loader import SpeculationPlan, plan_speculation
from pyggml_dflash.errors import ModelFileError, UsageError, quoted
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import check_tensors
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.requests import NOTHING_TO_DRAFT_WITH, SWITCHED_OFF

LOG: Final = logging.getLogger(__name__)
_DEFAULTS: Final = EngineOptions()
_MODELS: Final = Path(__file__).resolve().parent.parent / "models"
DEFAULT_MODEL: Final = _MODELS / "pico-q8_0.gguf"
DEFAULT_DRAFT: Final = _MODELS / "pico-dflash-q8_0.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecChoice:
    """A drafter that will be made, or the reason for none."""

    plan: SpeculationPlan | None = None
    asked: bool = False  # the user named it, so that it must not be left out
    reason: str | None = None

    @property
    def may_be_left_out(self) -> bool:
        """True for a drafter that nobody named."""
        return self.plan is not None and not self.asked

    def without(self, reason: str) -> SpecChoice:
        """Plain decoding instead, and why; '' where it is only measured."""
        if reason:
            LOG.warning("decoding without drafts: %s", reason)
        return SpecChoice(reason=reason)


def choose_speculation(
    options: EngineOptions, file: GgufFile, config: ModelConfig, stack: ExitStack
) -> SpecChoice:
    """The drafter that options and files name; `stack` closes its file."""
    if options.spec == "off":
        return SpecChoice(reason=SWITCHED_OFF)
    if options.draft is not None or options.spec != "auto":
        draft = DEFAULT_DRAFT if options.spec == "dflash" and options.draft is None else options.draft
        plan = plan_speculation(replace(options, draft=draft), file, config, stack)
        return SpecChoice(plan=plan, asked=True)
    reason = NOTHING_TO_DRAFT_WITH
    for candidate in _candidates(options, file, config):
        try:
            plan = plan_speculation(candidate, file, config, stack)
            assert plan is not None
            check_tensors(file, plan.target_tensors)
            return SpecChoice(plan=plan)
        except ModelFileError as error:
            reason = str(error)
    if options.draft_causal != "auto":
        raise UsageError(f"draft_causal is {options.draft_causal!r}, but there is no DFlash draft")
    return SpecChoice(reason=reason)


def note_unused(options: EngineOptions, plan: SpeculationPlan | None) -> None:
    """Tell of options that were given and that nothing reads."""
    for name, reason in _unread(options, plan).items():
        value = getattr(options, name)
        if value != getattr(_DEFAULTS, name):
            LOG.warning("%s is %s, but %s", name, quoted(str(value) if name == "draft" else value), reason)


def _unread(options: EngineOptions, plan: SpeculationPlan | None) -> dict[str, str]:
    """Options that nothing reads, whether they were given or not, and why."""
    found: dict[str, str] = {}
    if options.spec == "off":
        found |= dict.fromkeys(("draft", "draft_causal"), "spec is 'off': it is not read")
    if plan is None:
        found["spec_width"] = "nothing drafts: every step decodes one token"
    if plan is None or not isinstance(plan.block, StreamMtpBlock):
        found["mtp_convention"] = "there is no MTP block of qwen4exp, which alone knows of conventions"
    if options.expert_placement is None:
        found["expert_budget_mib"] = "no experts are copied: pass expert_placement with counts"
    if options.kv_cache_dir is None:
        files = ("kv_cache_budget", "kv_cache_min_tokens")
        found |= dict.fromkeys(files, "no state gets a file: pass kv_cache_dir")
    return found


def _candidates(options: EngineOptions, file: GgufFile, config: ModelConfig) -> list[EngineOptions]:
    """What 'auto' stands for, best first."""
    found = []
    if file.path.resolve() == DEFAULT_MODEL:
        found.append(replace(options, draft=DEFAULT_DRAFT))
    if config.n_mtp:
        found.append(replace(options, spec="mtp"))
    return found
