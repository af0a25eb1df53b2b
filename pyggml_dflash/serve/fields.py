"""Fields that several request bodies share, and what they become for the engine. Layer 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from pyggml_dflash.errors import UsageError
from pyggml_dflash.options import MAX_COUNT, MAX_SEED, SamplingOptions, Spec
from pyggml_dflash.serve.bodies import RequestBody, Unsupported

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
StopText = Annotated[str, Field(min_length=1)]
Stop = StopText | Annotated[list[StopText], Field(max_length=16)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
ReasoningBudget = Annotated[
    int,
    Field(ge=-1, le=MAX_COUNT, description="Tokens of reasoning after which it is closed; -1: any number."),
]
TokenId = Annotated[int, Field(ge=0)]
BiasKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class StreamOptions(RequestBody):
    """What a stream says beside the answer."""

    include_usage: bool | None = Field(None, description="Send token counts at the end.")
    include_obfuscation: Any = Field(None, description="Accepted; chunks are never padded.")


class SamplingFields(RequestBody):
    """How tokens are chosen, where OpenAI's routes agree; what is absent is as the server was started."""

    temperature: Temperature | None = Field(None, description="0 takes the best token.")
    top_p: TopP | None = None
    top_k: TopK | None = Field(None, description="Keep the k best tokens; 0: all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[BiasKey, Penalty] | None = Field(None, description="Token id -> added to its logit.")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        None, description="Same seed, same answer; of n answers the i-th one has seed + i."
    )
    stop: Stop | None = Field(None, description="The answer ends before the earliest of these.")
    spec: Spec | None = Field(None, description="What drafts tokens, as the engine can.")
    ignore_eos: bool | None = Field(None, description="Go on where the model would end.")

    def sampling(self, defaults: SamplingOptions) -> SamplingOptions:
        """The server's defaults with what this request says."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "seed",
        )
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        biases = self.logit_bias
        given["logit_bias"] = None if biases is None else {int(token): bias for token, bias in biases.items()}
        return with_given(defaults, given)


def with_given(defaults: SamplingOptions, given: Mapping[str, Any]) -> SamplingOptions:
    """`defaults` with the values that are not None."""
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings as the engine wants them."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


class TextPart(RequestBody):
    """A piece of a message; only text can be used."""

    type: Literal["text"]
    text: str
    cache_control: Any = Field(None, description="Accepted; prefixes are reused without it.")


class FunctionCall(RequestBody):
    """A function that the model called."""

    name: str
    arguments: str = Field(description="JSON text of an object.")


class ToolCall(RequestBody):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Any = Field(None, description="Accepted, since streams have it.")


class ChatMessage(RequestBody):
    """One message. `developer` is `system`; system messages at the beginning become one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Any = Field(None, description="Accepted, since answers have it.")
    annotations: Any = Field(None, description="Accepted, since answers have it.")
    audio: Unsupported = None
    function_call: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """What the chat template reads."""
        return self.model_dump(exclude_none=True, exclude={"refusal", "annotations"})


def check_count(messages: Sequence[object], most: int, name: str = "messages") -> None:
    """Refuse a conversation of too many messages."""
    if len(messages) > most:
        raise UsageError(f"{name} has {len(messages)} items; this server takes at most {most}")
