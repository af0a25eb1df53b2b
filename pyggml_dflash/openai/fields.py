"""The members of OpenAI's bodies for chat and text completions. Layer 7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from pyggml_dflash.errors import UsageError
from pyggml_dflash.openai.values import (
    FLAG,
    IGNORED,
    OBJECT,
    TEXT,
    UNSUPPORTED,
    Value,
    by_type,
    choice,
    either,
    items,
    mapping,
    number,
    only,
    record,
    text,
    typed,
    whole,
)
from pyggml_dflash.options import MAX_BIAS, MAX_SEED, SAMPLING_RANGES, Spec, refusal

MAX_CHOICES: Final = 1024
MAX_PROMPTS: Final = 2048
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20

COUNT: Final = whole(1)
TOKEN: Final = whole(0)
MODEL: Final = TEXT.about("A name of the model that is there, which is also meant where there is none.")
EFFORT: Final = choice("none", "minimal", "low", "medium", "high", "xhigh").about(
    "'none': no thinking; every other level: thinking, and levels are not told apart."
)
BUDGET: Final = whole(-1).about("Tokens of reasoning after which it is closed; -1: any number.")
CACHE_PROMPT: Final = FLAG.about("false: no stored state is continued, none is stored.")
TOOL_NAME: Final = text(
    pattern="[a-zA-Z0-9_.-]{1,128}", wanted="1 to 128 ASCII letters, digits, '_', '.', '-'"
)

SAMPLING: Final[Mapping[str, Value]] = {
    **{name: number(*found) for name, found in SAMPLING_RANGES.items()},
    "temperature": number(*SAMPLING_RANGES["temperature"]).about("0 takes the best token."),
    "top_k": whole(0).about("Keep the k best tokens; 0: all."),
    "seed": whole(0, MAX_SEED).about("Same seed, same answer; of n answers the i-th one has seed + i."),
}
STREAM_OPTIONS: Final = record(
    {
        "include_usage": FLAG.about("Send token counts at the end."),
        "include_obfuscation": IGNORED.about("Accepted; chunks are never padded."),
    }
)
_COMMON: Final[Mapping[str, Value]] = {
    "model": MODEL,
    **SAMPLING,
    "logit_bias": mapping("(0|[1-9][0-9]{0,8})", "token ids as in '198'", number(-MAX_BIAS, MAX_BIAS)).about(
        "Token id -> added to its logit."
    ),
    "n": whole(1, MAX_CHOICES).about("Answers to the same prompt."),
    "stop": either(text(least=1), items(text(least=1), most=MAX_STOPS)).about(
        "The answer ends before the earliest of these."
    ),
    "spec": choice(*get_args(Spec)).about("What drafts tokens, as the engine can."),
    "ignore_eos": FLAG.about("Go on where the model would end."),
    "max_tokens": COUNT.about("Absent: as the engine's user says who started it, not 16."),
    "cache_prompt": CACHE_PROMPT,
    "json_schema": OBJECT.about("The answer is JSON of this schema."),
    "grammar": TEXT.about("The answer is a text of this grammar, in Lark or GBNF."),
    "regex": TEXT.about("The whole answer matches this expression."),
    "stream": FLAG,
    "stream_options": STREAM_OPTIONS,
    "return_progress": FLAG.about(
        "While the prompt is read, chunks of a stream tell how far: prompt_progress with total, cache, "
        "processed and time_ms. Without stream it changes nothing."
    ),
    "user": IGNORED,
    "metadata": IGNORED,
}

_TEXT_PART: Final = typed("text", {"text": TEXT}, {"cache_control": IGNORED})
_CALL: Final = record(
    {
        "id": TEXT,
        "type": choice("function"),
        "function": record(
            {"name": TEXT, "arguments": TEXT.about("JSON text of an object.")}, required=("name", "arguments")
        ),
        "index": IGNORED.about("Accepted, since streams have it."),
    },
    required=("id", "function"),
)
_MESSAGE: Final = record(
    {
        "role": choice("system", "developer", "user", "assistant", "tool"),
        "content": either(TEXT, items(by_type(text=_TEXT_PART))),
        "name": TEXT,
        "tool_calls": items(_CALL),
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
        "refusal": IGNORED.about("Accepted, since answers have it."),
        "annotations": IGNORED.about("Accepted, since answers have it."),
        "audio": UNSUPPORTED,
        "function_call": UNSUPPORTED,
    },
    required=("role",),
)
MESSAGES: Final = items(_MESSAGE, least=1).about(
    "The conversation. `developer` is `system`; system messages at the beginning become one."
)

FUNCTION: Final[Mapping[str, Value]] = {  # what it may have beside its name
    "description": TEXT,
    "parameters": OBJECT.about("JSON schema of the arguments, an object."),
    "strict": IGNORED,
}
TOOLS: Final = items(
    typed("function", {"function": record({"name": TOOL_NAME, **FUNCTION}, required=("name",))})
).about("Functions that the model may call.")
TOOL_CHOICE: Final = either(
    choice("none", "auto", "required"),
    typed("function", {"function": record({"name": TOOL_NAME}, required=("name",))}),
)
PARALLEL: Final = FLAG.about("false: at most one call.")

# A schema with its name: what it has, and what it may have. Nothing but the schema is allowed, so `strict`
# changes nothing.
NAMED_SCHEMA: Final[tuple[Mapping[str, Value], Mapping[str, Value]]] = (
    {"name": TEXT, "schema": OBJECT},
    {"description": IGNORED, "strict": IGNORED},
)
RESPONSE_FORMAT: Final = by_type(
    text=typed("text", {}),
    json_object=typed("json_object", {}),
    json_schema=typed(
        "json_schema",
        {"json_schema": record({**NAMED_SCHEMA[0], **NAMED_SCHEMA[1]}, required=tuple(NAMED_SCHEMA[0]))},
    ),
)

CHAT: Final = record(
    {
        "messages": MESSAGES,
        **_COMMON,
        "max_completion_tokens": COUNT,
        "logprobs": FLAG,
        "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
        "reasoning_effort": EFFORT,
        "chat_template_kwargs": record({"enable_thinking": FLAG, "thinking": FLAG}),
        "reasoning_budget": BUDGET,
        "response_format": RESPONSE_FORMAT,
        "modalities": items(choice("text")),
        "tools": TOOLS,
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": PARALLEL,
        **dict.fromkeys(
            (
                "prediction",
                "prompt_cache_key",
                "prompt_cache_retention",
                "safety_identifier",
                "service_tier",
                "store",
            ),
            IGNORED,
        ),
        **dict.fromkeys(
            ("audio", "function_call", "functions", "verbosity", "web_search_options"), UNSUPPORTED
        ),
    },
    required=("messages",),
)


def _check_prompt(where: str, value: Any) -> None:
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not value:
        wanted = "it must be text, a list of token ids, or a list of either; a list has at least 1 item"
        raise UsageError(str(refusal(where, value, wanted)), param=where)
    if isinstance(value[0], (str, list)):
        items(either(TEXT, items(TOKEN, least=1)), most=MAX_PROMPTS).check(where, value)
    else:
        items(TOKEN).check(where, value)


_TOKENS: Final = items(TOKEN, least=1).schema
PROMPT: Final = Value(
    {
        "anyOf": [
            TEXT.schema,
            _TOKENS,
            items(Value({"anyOf": [TEXT.schema, _TOKENS]}, _check_prompt), least=1, most=MAX_PROMPTS).schema,
        ]
    },
    _check_prompt,
).about("A text, token ids, or a list of either.")

COMPLETION: Final = record(
    {
        "prompt": PROMPT,
        **_COMMON,
        "logprobs": whole(0, MAX_TOP_LOGPROBS),
        "echo": only(False, "prompts are not repeated here"),
        "best_of": only(1, "ask for several answers with n"),
        "suffix": UNSUPPORTED,
    },
    required=("prompt",),
)
