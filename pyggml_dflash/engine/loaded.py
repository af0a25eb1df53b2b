"""A model that is ready: what it is, and what it can do for a request. Layer 6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyggml_dflash.engine.constraint import Constraints
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.drafter_loader import DraftInfo
from pyggml_dflash.engine.fit_report import FitReport
from pyggml_dflash.engine.guide import AnswerGuide
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.errors import ContextOverflowError, UsageError, quoted
from pyggml_dflash.model.chat import ChatTemplate
from pyggml_dflash.model.tokenizer import Tokenizer
from pyggml_dflash.options import Auto, refusal
from pyggml_dflash.requests import GenerationRequest
from pyggml_dflash.state.cuts import TurnMarkers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was opened, and what was chosen where an option left the choice."""

    model: Path
    name: str
    architecture: str
    device: str
    backend: str  # what computes on the device, as ggml calls it: 'CPU', 'CUDA', 'ROCm', 'Vulkan', 'RPC'
    devices: tuple[str, ...]  # that compute, the target first
    split: str  # what lies apart: 'none', 'experts' or 'layers'
    placement: str  # what lies where, and why
    threads: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    tokenizer: str  # how it cuts text, by the name in the file
    n_layer: int
    slots: int
    chunk: int
    stream_rows: int  # fewest rows of a forward for which experts in host memory are copied; 0: never
    granule: int  # most rows of a prompt's forward: the chunk, and less where there are several slots
    cache_type_k: str
    cache_type_v: str
    flash_attn: bool
    weight_bytes: dict[str, int]  # by where they lie: 'mapped', 'uploaded', or a repacked layout
    state_bytes: int
    has_chat_template: bool
    chat_template_file: Path | None  # it is from here, not the model's own
    tools_supported: bool  # the chat template has a place for them
    reasoning_supported: bool
    spec: str  # 'off', or the drafter: 'dflash', 'mtp'
    spec_reason: str | None  # why there is no drafter
    max_width: int  # most rows of a verify forward; 1 without a drafter
    decode_mode: str  # how slots decode: 'single', 'batched', 'padded' or 'sequential'
    decode_rows: int  # most slots that decode in one forward
    decode_reason: str
    joined_rows: int  # most rows of a forward that prompts of several slots share; 0: each runs alone
    joined_reason: str
    exact_width: int  # most rows of a verify forward that give what decoding gives; 1: not known of more
    rollback: str | None  # how rejected drafts are taken back: 'snapshots' or 'replay'
    draft: DraftInfo | None  # a draft with a file of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready; everything native in it belongs to `core`."""

    core: EngineCore
    tokenizer: Tokenizer
    template: ChatTemplate
    info: EngineInfo
    fit: FitReport
    forbidden_ids: npt.NDArray[np.int64] | None  # vocabulary rows without a token
    markers: TurnMarkers | None  # what turns begin and end with; None: nothing that is known
    constraints: Constraints
    spec_width: int | Auto

    def check(self, request: GenerationRequest) -> None:
        """Raise `ContextOverflowError` or `UsageError` for what this engine cannot do."""
        self._check_length(request)
        info, spec, width = self.info, request.spec, request.spec_width
        if spec in ("dflash", "mtp") and spec != info.spec:
            has = "has no drafter" if info.spec == "off" else f"drafts with {info.spec!r}"
            raise UsageError(f"spec is {spec!r}; this engine {has}; open it with that")
        if spec != "off" and isinstance(width, int) and width > info.max_width:
            raise UsageError(f"spec_width is {width}; this engine verifies at most {info.max_width} rows")
        if request.sampling.logit_bias:  # a sampler refuses biases of tokens that are not there
            Sampler(request.sampling, (), n_vocab=info.n_vocab, forbidden=self.forbidden_ids)
        if request.constraint is not None:
            self.constraints.matcher(request.constraint)

    def sampler(self, request: GenerationRequest) -> Sampler:
        """What chooses the tokens of one answer."""
        block, guide = request.reasoning_block, None
        matcher = None if request.constraint is None else self.constraints.matcher(request.constraint)
        if matcher is not None or (block is not None and block.budget >= 0):
            guide = AnswerGuide(self.tokenizer, block, matcher)
        return Sampler(
            request.sampling,
            request.tokens,
            n_vocab=self.info.n_vocab,
            forbidden=self.forbidden_ids,
            guide=guide,
        )

    def drafts(self, request: GenerationRequest) -> bool:
        """True if tokens may be drafted."""
        return self.info.spec != "off" and request.spec != "off"

    def width(self, request: GenerationRequest) -> int | None:
        """Rows of every verify forward; None where cost and acceptance decide."""
        width = self.spec_width if request.spec_width is None else request.spec_width
        return None if width == "auto" else width

    def check_length(self, n_tokens: int) -> None:
        """Raise `ContextOverflowError` for a text that the context cannot hold."""
        if n_tokens > self.info.n_ctx:
            raise self._overflow(n_tokens, None)

    def check_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Ids of the vocabulary as Python's integers; `UsageError` for what is none."""
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, (Sequence, np.ndarray)):
            raise refusal("tokens", tokens, "they must be a sequence of token ids")
        n_vocab = self.info.n_vocab
        for i, token in enumerate(tokens):
            is_whole = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
            if not is_whole or not 0 <= token < n_vocab:
                raise UsageError(
                    f"token {i} is {quoted(token)}; token ids are whole numbers from 0 to {n_vocab - 1}"
                )
        return tuple(int(t) for t in tokens)

    def _check_length(self, request: GenerationRequest) -> None:
        needed = len(request.tokens) + max(0, (request.max_tokens or 1) - 1)
        if needed > self.info.n_ctx:
            raise self._overflow(len(request.tokens), request.max_tokens)

    def _overflow(self, n_prompt: int, max_tokens: int | None) -> ContextOverflowError:
        info = self.info
        return ContextOverflowError(
            n_prompt=n_prompt, max_tokens=max_tokens, n_ctx=info.n_ctx, n_ctx_train=info.n_ctx_train
        )
