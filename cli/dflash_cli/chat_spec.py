"""What `/spec` sets in a chat: what drafts tokens, and how many rows are verified. Layer 9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, get_args

from dflash_cli.ui import say
from pyggml_dflash.api import Engine
from pyggml_dflash.errors import DflashError, UsageError
from pyggml_dflash.options import Auto, EngineOptions, Spec, check_spec_width

KINDS: Final[tuple[Spec, ...]] = get_args(Spec)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a line asks for; None leaves it as it is."""

    spec: Spec | None
    width: int | Auto | None

    @classmethod
    def parse(cls, text: str) -> Wish:
        """From 'off', 'mtp', '4', 'dflash 4', 'auto auto'; else `UsageError`."""
        first, *rest = text.split()
        spec = next((kind for kind in KINDS if kind == first), None)
        widths = rest if spec is not None else [first, *rest]
        if len(widths) > 1:
            raise UsageError(f"/spec takes one of {', '.join(KINDS)} and a number of rows; {text!r} has more")
        if not widths or widths[0] == "auto":
            return cls(spec, "auto" if widths else None)
        if not widths[0].isdecimal() or not widths[0].isascii():
            raise UsageError(f"{widths[0]!r} is neither one of {', '.join(KINDS)} nor a number of rows")
        width = int(widths[0][:10])
        check_spec_width(width)
        return cls(spec, width)


class ChatDrafting:
    """The engine of a chat and how its answers are drafted.

    Switching to a drafter that is not loaded loads the model again, with the conversation kept.
    """

    def __init__(
        self, engine: Engine, options: EngineOptions, reopen: Callable[[EngineOptions], Engine]
    ) -> None:
        """`options`: what `engine` was opened with; `reopen` opens another, which its maker closes."""
        self.engine = engine
        self._asked, self._opened, self._reopen = options, options, reopen
        named = options.draft is not None and engine.info.spec != "off"
        self._draft_kind = engine.info.spec if named else None  # of the draft given, where that is known
        self._off = False
        self.width: int | Auto | None = None  # for requests; None: as the engine was opened

    @property
    def spec(self) -> Spec | None:
        """For requests; None: as the engine was opened."""
        return "off" if self._off else None

    def set(self, text: str) -> None:
        """Do what a line says, or show what is set if it says nothing."""
        if text:
            self._apply(Wish.parse(text))
        say(self.describe())

    def describe(self) -> str:
        """What drafts the next answer."""
        info = self.engine.info
        if info.spec == "off":
            return f"no drafts: {info.spec_reason}"
        if self._off:
            return f"no drafts: switched off; /spec auto drafts with {info.spec} again"
        name = f" ({info.draft.path.name})" if info.draft is not None else ""
        width = self._opened.spec_width if self.width is None else self.width
        rows = "as many rows as pay" if width == "auto" else f"{width} rows"
        return f"drafts by {info.spec}{name}, {rows} per verify step"

    def _apply(self, wish: Wish) -> None:
        if wish.spec not in (None, "off") and not self._suits(wish.spec):
            self._open(wish.spec)
        most = self.engine.info.max_width
        if isinstance(wish.width, int) and wish.spec != "off" and wish.width > most:
            raise UsageError(f"{wish.width} rows are too many; this engine verifies at most {most}")
        if wish.spec is not None:
            self._off = wish.spec == "off"
        if wish.width is not None:
            self.width = wish.width

    def _suits(self, spec: Spec | None) -> bool:
        loaded = self.engine.info.spec
        return loaded == spec or (spec == "auto" and (loaded != "off" or self._opened.spec != "off"))

    def _open(self, spec: Spec | None) -> None:
        assert spec is not None
        other = self._draft_kind is not None and spec not in ("auto", self._draft_kind)
        options = replace(self._asked, spec=spec, draft=None if other else self._asked.draft)
        say(f"loading the model again, with --spec {spec}")
        self.engine.close()
        try:
            self.engine = self._reopen(options)
        except DflashError:
            self.engine = self._reopen(self._opened)
            raise
        self._opened, self.width = options, None  # other drafters have other limits
