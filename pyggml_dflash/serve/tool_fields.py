"""Tools as requests of each protocol describe them, and what the engine gets of them. Layer 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from pyggml_dflash.errors import UsageError
from pyggml_dflash.serve.bodies import Ignored, RequestBody

ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
Schema = dict[str, Any]
Choice = Literal["none", "auto", "required"]


class FunctionFields(RequestBody):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Schema | None = Field(None, description="JSON schema of the arguments, an object.")
    strict: Ignored = None

    def for_engine(self) -> dict[str, Any]:
        """The tool as templates show it to models."""
        shown = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return _function({key: value for key, value in shown.items() if value is not None})


class ChatTool(RequestBody):
    """A tool of a chat completion."""

    type: Literal["function"]
    function: FunctionFields

    def for_engine(self) -> dict[str, Any]:
        """The tool as templates show it to models."""
        return self.function.for_engine()


class FunctionName(RequestBody):
    """A function by its name."""

    name: ToolName


class ChatToolChoice(RequestBody):
    """The tool that a chat completion must call."""

    type: Literal["function"]
    function: FunctionName


class ResponsesTool(FunctionFields):
    """A tool of a response."""

    type: Literal["function"]


class ResponsesToolChoice(FunctionName):
    """The tool that a response must call."""

    type: Literal["function"]


class MessagesTool(RequestBody):
    """A tool of Anthropic's messages; those that a server would run are not known here."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Schema = Field(description="JSON schema of the arguments, an object.")
    cache_control: Ignored = None
    strict: Ignored = None

    def for_engine(self) -> dict[str, Any]:
        """The tool as templates show it to models."""
        shown = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return _function({key: value for key, value in shown.items() if value is not None})


class MessagesToolChoice(RequestBody):
    """Whether a message may or must call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="With 'tool': the one that must be called.")
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> Choice:
        """The same in OpenAI's words."""
        words: dict[str, Choice] = {"auto": "auto", "none": "none"}
        return words.get(self.type, "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a model may call in its answer."""

    tools: list[dict[str, Any]] | None  # None: nothing
    one_call: bool = False  # the answer ends with its first call
    must_call: bool = False  # the answer is calls
    name: str | None = None  # of the tool that must be called; None: any


def offer(
    tools: Sequence[ChatTool | ResponsesTool | MessagesTool] | None,
    choice: Choice | ChatToolChoice | ResponsesToolChoice | MessagesToolChoice | None,
    *,
    parallel: bool | None,
) -> Offer:
    """What a request's fields mean together; 'none' hides the tools from the model."""
    kind, name = _choice(choice)
    if not tools and kind == "required":
        raise UsageError("tool_choice demands a call, but there are no tools")
    if kind == "none" or not tools:
        return Offer(tools=None)
    return Offer(
        tools=[tool.for_engine() for tool in tools],
        one_call=parallel is False or name is not None,
        must_call=kind == "required",
        name=name,
    )


def _choice(
    choice: Choice | ChatToolChoice | ResponsesToolChoice | MessagesToolChoice | None,
) -> tuple[Choice, str | None]:
    """Whether a call may come or must, and of which tool."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        return choice, None
    if isinstance(choice, MessagesToolChoice):
        if (choice.type == "tool") != (choice.name is not None):
            raise UsageError(f"tool_choice has type {choice.type!r} and name {choice.name!r}")
        return choice.choice, choice.name
    return "required", choice.function.name if isinstance(choice, ChatToolChoice) else choice.name


def _function(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": fields}
