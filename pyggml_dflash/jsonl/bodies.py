"""What a line asks for, as requests to an engine. Layer 8.

The one place where names of OpenAI's request bodies become arguments. A name is used, accepted because it
changes nothing here, or refused; null is the same as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pyggml_dflash.batch import BatchRequest
from pyggml_dflash.errors import UsageError
from pyggml_dflash.jsonl.forms import FORMS, Calls, calls_of, form_of
from pyggml_dflash.jsonl.problems import refused
from pyggml_dflash.options import MAX_SEED, SamplingOptions, check_choice, check_flag, check_int, refusal
from pyggml_dflash.requests import Constraint

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 2048
MAX_TOP_LOGPROBS: Final = 20

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
_IGNORED: Final = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds where a line says nothing."""

    system: str | None = None  # in front of conversations that begin without one
    reasoning: bool | None = None
    reasoning_budget: int = -1
    constraint: Constraint | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    raw: bool = False  # a prompt is continued as it is, not taken for a turn of a conversation
    model_names: tuple[str, ...] = ()  # under which lines may ask for the model, beside its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one line asks for: the answers to `requests`, each given `n` times, in the shape of `kind`."""

    kind: Literal["chat", "completion"]
    model: str | None
    requests: tuple[BatchRequest, ...]
    n: int = 1
    calls: Calls = field(default_factory=Calls)  # of the tools of a conversation

    @property
    def all_requests(self) -> list[BatchRequest]:
        """Every request as often as it is to be answered, each with a seed of its own where one was given."""
        return [_with_seed(request, i) for request in self.requests for i in range(self.n)]


def _with_seed(request: BatchRequest, i: int) -> BatchRequest:
    seed = request.sampling.seed
    if seed is None or i == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + i) % (MAX_SEED + 1)))


def understand(value: Mapping[str, Any] | str, defaults: Defaults) -> Ask:
    """The requests of a line. Raises `Refused` or `UsageError` for what cannot be one."""
    if isinstance(value, str):
        return _simple({"prompt": value}, defaults)
    line = {name: item for name, item in value.items() if name != "custom_id"}
    if line.keys() & {"method", "url", "body"}:
        return _enveloped(line, defaults)
    return _simple(line, defaults)


def _enveloped(line: Mapping[str, Any], defaults: Defaults) -> Ask:
    fields = Fields(line)
    method, url, body = fields.take("method"), fields.take("url"), fields.take("body")
    fields.finish()
    if method != "POST":
        raise refused("invalid_method", f"method is {_shown(method)}; it must be 'POST'")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise refused("invalid_url", f"url is {_shown(url)}; it must be {CHAT_URL!r} or {COMPLETION_URL!r}")
    if not isinstance(body, Mapping):
        raise refusal("body", body, "it must be an object")
    return _chat(body, defaults) if url == CHAT_URL else _completion(body, defaults)


def _simple(line: Mapping[str, Any], defaults: Defaults) -> Ask:
    prompt, messages = line.get("prompt"), line.get("messages")
    if (prompt is None) == (messages is None):
        known = "'prompt', 'messages', or 'method', 'url' and 'body'"
        raise UsageError(f"the line has {_names(line)}; a request has one of {known}")
    if messages is not None:
        return _chat(line, defaults)
    if defaults.raw:
        return _completion(line, defaults)
    if not isinstance(prompt, str) or not prompt:
        raise refusal("prompt", prompt, "it must be text; tokens and lists need --raw")
    rest = {name: item for name, item in line.items() if name != "prompt"}
    return _chat({**rest, "messages": [{"role": "user", "content": prompt}]}, defaults)


def _chat(body: Mapping[str, Any], defaults: Defaults) -> Ask:
    fields = Fields(body)
    common = _common(fields, defaults)
    calls = calls_of(fields.take("tools"), fields.take("tool_choice"), fields.take("parallel_tool_calls"))
    reasoning, budget = _reasoning(fields, defaults)
    request = BatchRequest(
        messages=_with_system(fields.take("messages"), defaults.system),
        tools=calls.tools,
        reasoning=reasoning,
        reasoning_budget=budget,
        constraint=_constraint(fields, calls, defaults.constraint),
        max_tokens=_max_tokens(fields, defaults.max_tokens),
        logprobs=_chat_logprobs(fields),
        **common,
    )
    if fields.take("modalities") not in (None, ["text"]):
        raise refusal("modalities", fields.take("modalities"), 'it must be ["text"]')
    fields.finish(unsupported=("audio", "function_call", "functions", "verbosity", "web_search_options"))
    return _ask("chat", fields, (request,), calls)


def _completion(body: Mapping[str, Any], defaults: Defaults) -> Ask:
    fields = Fields(body)
    common = _common(fields, defaults)
    logprobs = fields.take("logprobs")
    if logprobs is not None:
        check_int("logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
    if fields.take("echo"):
        raise UsageError("echo is true; prompts are not repeated here")
    if fields.take("best_of") not in (None, 1):
        raise UsageError("best_of is not 1; ask for several answers with n")
    max_tokens, ignore_eos = fields.take("max_tokens"), fields.take("ignore_eos")
    common["max_tokens"] = defaults.max_tokens if max_tokens is None else max_tokens
    forms = {name: fields.take(name) for name in FORMS if name != "response_format"}
    common["constraint"] = form_of(forms, defaults.constraint)
    requests = tuple(
        BatchRequest(
            prompt=prompt, logprobs=logprobs, ignore_eos=False if ignore_eos is None else ignore_eos, **common
        )
        for prompt in _prompts(fields.take("prompt"))
    )
    fields.finish(unsupported=("suffix",))
    return _ask("completion", fields, requests, Calls())


def _ask(
    kind: Literal["chat", "completion"],
    fields: Fields,
    requests: tuple[BatchRequest, ...],
    calls: Calls,
) -> Ask:
    n, model = fields.take("n"), fields.take("model")
    if n is not None:
        check_int("n", n, 1, MAX_CHOICES)
    if model is not None and not isinstance(model, str):
        raise refusal("model", model, "it must be a name")
    return Ask(kind=kind, model=model, requests=requests, n=n or 1, calls=calls)


class Fields:
    """The members of an object; what is never taken is refused at the end."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members = members
        self._known = {*_IGNORED, "n", "model"}

    def take(self, name: str) -> Any:
        """The value of a member; None where it is absent."""
        self._known.add(name)
        return self._members.get(name)

    def finish(self, *, unsupported: tuple[str, ...] = ()) -> None:
        """Refuse members that have a meaning elsewhere and those without one."""
        for name, value in self._members.items():
            if name in self._known or (name in unsupported and value is None):
                continue
            why = "is not supported here" if name in unsupported else "is not known here"
            raise UsageError(f"{name[:60]!r} {why}; it would be ignored, so it is refused")


def _common(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    """Sampling, stop strings and drafting; arguments of a `BatchRequest`."""
    given = {name: fields.take(name) for name in _SAMPLING}
    biases = fields.take("logit_bias")
    given["logit_bias"] = None if biases is None else _biases(biases)
    sampling = replace(defaults.sampling, **{name: v for name, v in given.items() if v is not None})
    if fields.take("stream"):
        raise UsageError("stream is true; a batch has whole answers")
    if fields.take("stream_options") is not None:
        raise UsageError("stream_options has no meaning in a batch")
    stop, cache_prompt = fields.take("stop"), fields.take("cache_prompt")
    return {
        "sampling": sampling,
        "stop": defaults.stop if stop is None else _stop(stop),
        "spec": fields.take("spec"),
        "cache_prompt": True if cache_prompt is None else cache_prompt,
    }


def _biases(value: object) -> dict[int, object]:
    if not isinstance(value, Mapping):
        raise refusal("logit_bias", value, "it must map token ids to numbers")
    for token in value:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise refusal("logit_bias token", token, "it must be a token id as in '198'")
    return {int(token): bias for token, bias in value.items()}


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise refusal("stop", value, "it must be text or a list of texts")
    return tuple(value)


def _with_system(messages: object, system: str | None) -> Any:
    """The messages, with the default system message in front unless they begin with one of their own."""
    if not isinstance(messages, list) or not messages:
        raise refusal("messages", messages, "it must be a list of at least one message")
    role = messages[0].get("role") if isinstance(messages[0], Mapping) else None
    if system is None or role in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _max_tokens(fields: Fields, default: int | None) -> Any:
    older, newer = fields.take("max_tokens"), fields.take("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise UsageError("max_tokens and max_completion_tokens differ; give one")
    found = newer if older is None else older
    return default if found is None else found


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.take("logprobs"), fields.take("top_logprobs")
    if wanted is not None:
        check_flag("logprobs", wanted)
    if top is not None:
        check_int("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
        if not wanted:
            raise UsageError(f"top_logprobs is {top}, but logprobs is not true")
    return (top or 0) if wanted else None


def _reasoning(fields: Fields, defaults: Defaults) -> tuple[bool | None, int]:
    """Whether the model is to think first, and in how many tokens at most.

    Of what the line does not say the default holds, unless it contradicts what the line says.
    """
    effort, switches = fields.take("reasoning_effort"), fields.take("chat_template_kwargs")
    said: list[bool] = []
    if effort is not None:
        check_choice("reasoning_effort", effort, _EFFORTS)
        said.append(effort != "none")
    if switches is not None:
        if not isinstance(switches, Mapping) or not switches.keys() <= {"enable_thinking", "thinking"}:
            raise refusal("chat_template_kwargs", switches, "it may have enable_thinking and thinking")
        for name, value in switches.items():
            check_flag(f"chat_template_kwargs.{name}", value)
            said.append(value)
    if len(set(said)) > 1:
        raise UsageError("reasoning_effort and chat_template_kwargs contradict each other; give one")
    thinks, budget = said[0] if said else None, fields.take("reasoning_budget")
    if budget is None:
        budget = -1 if thinks and defaults.reasoning_budget == 0 else defaults.reasoning_budget
    if thinks is None and not (defaults.reasoning and budget == 0):
        thinks = defaults.reasoning
    return thinks, budget


def _constraint(fields: Fields, calls: Calls, default: Constraint | None) -> Constraint | None:
    """What the answer of a conversation must be; None where that is a call, whose form the engine knows."""
    form = form_of({name: fields.take(name) for name in FORMS}, None if calls.demanded else default)
    if form is not None and calls.demanded:
        raise UsageError(f"{form.kind} and tool_choice each say what the answer must be; give one")
    if form is not None and calls.tools is not None:
        raise UsageError(f"{form.kind} leaves no room for calls of tools; leave tools out, or choose 'none'")
    return form


def _prompts(prompt: object) -> list[Any]:
    """Texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    wanted = "it must be text, a list of token ids, or a list of either"
    if not isinstance(prompt, list) or not prompt:
        raise refusal("prompt", prompt, wanted)
    if all(isinstance(item, (str, list)) for item in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise UsageError(f"prompt has {len(prompt)} items; a line may have {MAX_PROMPTS}")
        return prompt
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    raise refusal("prompt", prompt, wanted)


def _names(line: Mapping[str, Any]) -> str:
    return ", ".join(repr(name[:60]) for name in list(line)[:8]) or "nothing"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
