"""Messages to prompt text, by a chat template. Layer 2.

Templates are Jinja, come inside model files or from users, and run in a sandbox with what they may expect
from Hugging Face: `raise_exception`, `strftime_now`, `tojson`, loop controls, `{% generation %}`. They cannot
reach Python objects or change what they are given, and must end within seconds; prompts above 8 Mi characters
are refused.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from pyggml_dflash.errors import DamagedFileError, DflashError, UnsupportedModelError, UsageError
from pyggml_dflash.model.answer import REASONING_TAGS, AnswerForm
from pyggml_dflash.model.call_parser import CALL_OPEN, FUNCTION_OPEN
from pyggml_dflash.model.messages import Message, Turn, read_messages
from pyggml_dflash.model.template_sandbox import TemplateSandbox, counted
from pyggml_dflash.model.tokenizer import MAX_TEXT_CHARS, Tokenizer
from pyggml_dflash.model.tools import read_tools

log = logging.getLogger(__name__)

TEMPLATE_KEY: Final = "tokenizer.chat_template"
WAY_OUT: Final = "--raw continues a text without one"
MAX_TRACED_TURNS: Final = 256  # finding the refused message renders every beginning of the conversation
_SWITCHES: Final = ("enable_thinking", "thinking")  # what templates call the reasoning switch
_GIVEN: Final = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})

CHATML: Final = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


class ChatTemplate:
    """How one model wants conversations written. Rendering may run on any thread.

    A rendered prompt contains the control tokens as text, so it is encoded with `parse_special`; whether
    it begins with BOS is the template's choice, and `Tokenizer.encode` adds no second one.
    """

    exists: bool  # False: there is nothing to render with
    tools_supported: bool  # the template has a place for them
    reasoning_supported: bool  # the template has a switch for it
    form: AnswerForm  # how the model writes its answers

    def __init__(self, source: str | None, tokenizer: Tokenizer) -> None:
        """`source` None: the model has no template, and `render` says so."""
        self._environment = sandbox()
        self._template: jinja2.Template | None = None
        self._reads: frozenset[str] = frozenset()
        self._mentions_thinking = source is not None and "think" in source
        self._problem: tuple[type[DflashError], str] = (UsageError, "the model has no chat template")
        tokens = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        self._tokens = {n: "" if i is None else tokenizer.token_text(i) for n, i in tokens.items()}
        if source is not None:
            self._compile(source)
        self.exists = source is not None
        self.tools_supported = "tools" in self._reads
        self.reasoning_supported = any(switch in self._reads for switch in _SWITCHES)
        self.form = _form("" if source is None else source)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, *, given: str | None = None
    ) -> ChatTemplate:
        """The template of a GGUF; ChatML when it has none but its vocabulary knows <|im_start|>.

        `given` takes its place. A template that cannot be compiled is reported by `render`, so that the model
        runs without it.
        """
        if given is not None:
            return cls(given, tokenizer)
        source = metadata.get(TEMPLATE_KEY)
        if source is not None and not isinstance(source, str):
            raise DamagedFileError(f"{TEMPLATE_KEY} is {str(source)[:60]!r}; a string is needed")
        if source is None and tokenizer.find("<|im_start|>") is not None:
            log.info("the model has no chat template; ChatML is used, since it has <|im_start|>")
            source = CHATML
        return cls(source, tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: bool | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation, see `messages` for what one may be.

        `reasoning` None leaves the choice to the template; False is granted where a template knows no
        thinking. `extra` sets further variables that the template reads. UsageError: a message that the
        template refuses, by its index; something asked for that the template knows nothing of.
        """
        if self._template is None:
            kind, problem = self._problem
            raise kind(f"{problem}; {WAY_OUT}")
        turns = read_messages(messages)
        variables = {
            **self._tokens,
            **self._extra_variables(extra, reasoning),
            **self._tool_variables(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._environment.bounded():
            try:
                return self._run(turns, variables)
            except UsageError:
                raise
            except Exception as error:  # a template fails in as many ways as Python does
                raise UsageError(self._refusal(turns, variables, error)) from error

    def _compile(self, source: str) -> None:
        try:
            self._reads = self._environment.variables_of(source)
            self._template = self._environment.template(source)
        except jinja2.TemplateSyntaxError as error:
            problem = f"line {error.lineno} of the chat template cannot be used: {error.message}"
            self._problem = UnsupportedModelError, problem
        except Exception as error:  # what Jinja accepts may still be too deep or too long for Python
            self._problem = UnsupportedModelError, f"the chat template cannot be compiled: {error}"

    def _run(self, turns: Sequence[Turn], variables: Mapping[str, Any]) -> str:
        assert self._template is not None
        return rendered(self._template, {**variables, "messages": [turn.message for turn in turns]})

    def _refusal(self, turns: Sequence[Turn], variables: Mapping[str, Any], error: Exception) -> str:
        """What to say of an error: the first message from which on every beginning ends with it."""
        first = None
        for n in range(1, len(turns) + 1 if len(turns) <= MAX_TRACED_TURNS else 0):
            try:
                self._run(turns[:n], variables)
            except Exception as other:
                if str(other) == str(error):
                    first = n - 1 if first is None else first
                    continue
            first = None
        where = "the messages" if first is None else f"messages[{turns[first].index}]"
        return f"the chat template refuses {where}: {str(error) or type(error).__name__}"

    def _tool_variables(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        read_tools(tools)
        if not tools:
            return {"tools": None}
        if not self.tools_supported:
            raise UsageError("tools cannot be used: this model's chat template has no place for them")
        return {"tools": [dict(tool) for tool in tools]}

    def _extra_variables(self, extra: Mapping[str, Any] | None, reasoning: bool | None) -> dict[str, Any]:
        variables = dict(extra or {})
        settable = self._reads - _GIVEN - set(self._environment.globals)
        for name in variables:
            if name not in settable:
                known = ", ".join(sorted(settable)) or "nothing of the kind"
                raise UsageError(f"the chat template does not read {name!r}; it reads {known}")
        if reasoning is None:
            return variables
        if not self.reasoning_supported:
            if reasoning or self._mentions_thinking:
                raise UsageError(f"reasoning is {reasoning}; this model's chat template has no switch for it")
            return variables
        for switch in _SWITCHES:
            if variables.setdefault(switch, reasoning) is not reasoning:
                raise UsageError(f"reasoning is {reasoning}, but {switch!r} is {variables[switch]!r}")
        return variables


def rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """What a template makes of its variables; `UsageError` for more than a prompt may have.

    To be called where the template's sandbox is `bounded`.
    """
    pieces, n_chars = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        n_chars += len(piece)
        if n_chars > MAX_TEXT_CHARS:
            raise UsageError(f"the prompt is longer than {MAX_TEXT_CHARS} characters")
    return "".join(pieces)


def _form(source: str) -> AnswerForm:
    bare = bool(source) and CALL_OPEN not in source
    return AnswerForm(
        reasoning=next((tags for tags in REASONING_TAGS if tags[1] in source), None),
        bare_calls=bare,
        xml_calls=not bare and FUNCTION_OPEN in source,
        arguments_key="parameters" if bare and '"parameters"' in source else "arguments",
    )


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training, and means nothing here."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def sandbox() -> TemplateSandbox:
    """What templates are compiled for, and run in."""
    environment = TemplateSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
    )
    environment.filters["tojson"] = counted(_tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, where Jinja's own filter would write for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
