"""From bodies that OpenAI's clients send to requests of an engine. Layer 7.

The one place where members of these bodies become arguments. A member is used, accepted because it changes
nothing here, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pyggml_dflash.api import EngineInfo
from pyggml_dflash.batch import BatchRequest
from pyggml_dflash.errors import UsageError
from pyggml_dflash.openai.fields import CHAT, COMPLETION, SAMPLING
from pyggml_dflash.openai.forms import Calls, calls_of, fields_of, format_of, only_form
from pyggml_dflash.options import MAX_SEED, SamplingOptions
from pyggml_dflash.requests import Constraint

Body = Mapping[str, Any]
Turn = dict[str, Any]  # as chat templates read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds where a body says nothing."""

    system: str | None = None  # in front of conversations that begin without one
    reasoning: bool | None = None
    reasoning_budget: int = -1
    constraint: Constraint | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    raw: bool = False  # the prompt of a line is continued as it is, not taken for a turn of a conversation
    model_names: tuple[str, ...] = ()  # under which the model may be asked for, beside its own

    def thinking(self, said: bool | None, budget: int | None) -> tuple[bool | None, int]:
        """Whether the model is to think first, and in how many tokens at most; -1: any number.

        Of what a body does not say the default holds, unless it contradicts what the body says.
        """
        if budget is None:
            budget = -1 if said and self.reasoning_budget == 0 else self.reasoning_budget
        if said is None and not (self.reasoning and budget == 0):
            said = self.reasoning
        return said, budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one body asks for: the answers to `requests`, each given `n` times, in the shape of `kind`."""

    kind: Literal["chat", "completion"]
    model: str | None
    requests: tuple[BatchRequest, ...]
    n: int = 1
    calls: Calls = field(default_factory=Calls)  # of the tools of a conversation
    stream: bool = False
    include_usage: bool = False  # a stream ends with counts
    return_progress: bool = False  # a stream has chunks that tell how far the prompt is read

    @property
    def all_requests(self) -> list[BatchRequest]:
        """Every request as often as it is to be answered, each with a seed of its own where one was given."""
        return [_with_seed(request, i) for request in self.requests for i in range(self.n)]


def _with_seed(request: BatchRequest, i: int) -> BatchRequest:
    return replace(request, sampling=with_seed(request.sampling, i))


def with_seed(sampling: SamplingOptions, i: int) -> SamplingOptions:
    """How the i-th answer of several is sampled."""
    seed = sampling.seed
    return sampling if seed is None or i == 0 else replace(sampling, seed=(seed + i) % (MAX_SEED + 1))


def chat_ask(body: Body, defaults: Defaults) -> Ask:
    """What the body of a chat completion asks for. Raises `UsageError` for what cannot be asked."""
    CHAT.check("", body)
    choice = body.get("tool_choice")
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    calls = calls_of(
        [tool["function"] for tool in body.get("tools") or ()],
        choice if isinstance(choice, str) else None,
        named,
        parallel=body.get("parallel_tool_calls") is not False,
    )
    reasoning, budget = defaults.thinking(_thinks(body), body.get("reasoning_budget"))
    request = BatchRequest(
        messages=_with_system([turn_of(message) for message in body["messages"]], defaults.system),
        tools=calls.tools,
        reasoning=reasoning,
        reasoning_budget=budget,
        constraint=_chat_form(body, calls, defaults.constraint),
        max_tokens=_chat_length(body, defaults.max_tokens),
        logprobs=_chat_logprobs(body),
        **_common(body, defaults),
    )
    return _ask("chat", body, (request,), calls)


def completion_ask(body: Body, defaults: Defaults) -> Ask:
    """What the body of a text completion asks for. Raises `UsageError` for what cannot be asked."""
    COMPLETION.check("", body)
    forms = fields_of(body)
    common = _common(body, defaults)
    form = only_form(forms, Calls()) or defaults.constraint
    max_tokens = defaults.max_tokens if body.get("max_tokens") is None else body["max_tokens"]
    requests = tuple(
        BatchRequest(
            prompt=prompt, logprobs=body.get("logprobs"), constraint=form, max_tokens=max_tokens, **common
        )
        for prompt in _prompts(body["prompt"])
    )
    return _ask("completion", body, requests, Calls())


def other_model(name: str | None, names: Sequence[str], info: EngineInfo) -> str | None:
    """Why a body that asks for this model cannot be answered; None: it can.

    `names` are those that are shown; the file's work as well, and none means the model there is.
    """
    if name is None or name in (*names, info.name, info.model.stem, info.model.name):
        return None
    return f"the model {name[:80]!a} is not here; there is {(names or (info.name,))[0]!r}"


def _ask(
    kind: Literal["chat", "completion"], body: Body, requests: tuple[BatchRequest, ...], calls: Calls
) -> Ask:
    return Ask(
        kind=kind,
        model=body.get("model"),
        requests=requests,
        n=body.get("n") or 1,
        calls=calls,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        return_progress=bool(body.get("return_progress")),
    )


def _common(body: Body, defaults: Defaults) -> dict[str, Any]:
    """What chat and text completions have in common; arguments of a `BatchRequest`."""
    stop = body.get("stop")
    return {
        "sampling": sampling_of(body, defaults.sampling),
        "stop": defaults.stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        "spec": body.get("spec"),
        "ignore_eos": bool(body.get("ignore_eos")),
        "cache_prompt": body.get("cache_prompt") is not False,
    }


def sampling_of(body: Body, defaults: SamplingOptions) -> SamplingOptions:
    """How tokens are chosen: what the body says, else the defaults."""
    given = {name: body.get(name) for name in SAMPLING}
    biases = body.get("logit_bias")
    given["logit_bias"] = None if biases is None else {int(token): bias for token, bias in biases.items()}
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def turn_of(message: Body) -> Turn:
    """A message as chat templates read it."""
    unread = ("refusal", "annotations")
    turn = {name: v for name, v in message.items() if v is not None and name not in unread}
    if "tool_calls" in turn:
        turn["tool_calls"] = [{**call, "type": "function"} for call in turn["tool_calls"]]
    return turn


def with_reasoning(turn: Turn) -> Turn:
    """A turn whose reasoning was gathered as a list of texts, with all of it as one."""
    pieces = turn.get("reasoning_content")
    return turn if pieces is None else {**turn, "reasoning_content": "".join(pieces)}


def _with_system(turns: list[Turn], system: str | None) -> list[Turn]:
    """The turns, with the default system message in front unless they begin with one of their own."""
    if system is None or turns[0]["role"] in ("system", "developer"):
        return turns
    return [{"role": "system", "content": system}, *turns]


def _chat_length(body: Body, default: int | None) -> int | None:
    older, newer = body.get("max_tokens"), body.get("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise UsageError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    found = newer if older is None else older
    return default if found is None else found


def _chat_logprobs(body: Body) -> int | None:
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if top is not None and not wanted:
        raise UsageError(f"top_logprobs is {top}, but logprobs is not true", param="top_logprobs")
    return (top or 0) if wanted else None


def _thinks(body: Body) -> bool | None:
    """Whether the model is to think first; None: the body does not say."""
    effort, switches = body.get("reasoning_effort"), body.get("chat_template_kwargs") or {}
    said = {
        "reasoning_effort": None if effort is None else effort != "none",
        "chat_template_kwargs.enable_thinking": switches.get("enable_thinking"),
        "chat_template_kwargs.thinking": switches.get("thinking"),
    }
    given = {name: value for name, value in said.items() if value is not None}
    if len(set(given.values())) > 1:
        names = list(given)
        raise UsageError(f"{' and '.join(names)} contradict each other; give one", param=names[0])
    return next(iter(given.values()), None)


def _chat_form(body: Body, calls: Calls, default: Constraint | None) -> Constraint | None:
    """What the answer of a conversation must be; None where that is a call, whose form the engine knows."""
    format = body.get("response_format")
    form = only_form({"response_format": format_of(format), **fields_of(body)}, calls)
    is_silent = form is None and format is None and not calls.demanded
    return only_form({default.kind: default}, calls) if is_silent and default is not None else form


def _prompts(prompt: str | list[Any]) -> list[Any]:
    """Texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    return prompt if isinstance(prompt[0], (str, list)) else [prompt]
