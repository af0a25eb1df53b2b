"""Answers lines with one engine: in the command's process, or in each of several that Ray runs. Layer 8."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pyggml_dflash.api import Engine
from pyggml_dflash.batch import SPARE, BatchRequest, InFlight, Streams
from pyggml_dflash.errors import Cancelled, EngineClosed
from pyggml_dflash.jsonl.answers import body_of
from pyggml_dflash.jsonl.bodies import understand
from pyggml_dflash.jsonl.lines import Task
from pyggml_dflash.jsonl.problems import problem_of, refused
from pyggml_dflash.jsonl.records import Record, answered, failed
from pyggml_dflash.openai.asks import Ask, Defaults, other_model
from pyggml_dflash.openai.forms import held_to


def fitting(defaults: Defaults, engine: Engine) -> Defaults:
    """The defaults, with prompts continued as they are where the model has no chat template."""
    if engine.info.has_chat_template or defaults.system is not None:
        return defaults
    return replace(defaults, raw=True)


class LineWorker:
    """Makes records of tasks; the engine stays the caller's to close."""

    def __init__(self, engine: Engine, defaults: Defaults, settings: str) -> None:
        """`settings`: the digest that records bear. Raises what every line would fail with."""
        if defaults.constraint is not None:
            engine.check_constraint(defaults.constraint)
        self._engine, self._settings = engine, settings
        self._defaults = fitting(defaults, engine)

    def run(self, tasks: Iterable[Task], *, ordered: bool) -> InFlight[Task, Record]:
        """The records of tasks, as many in flight as keep every slot busy; exactly one for each."""
        return InFlight(self.record, tasks, n=self._engine.options.slots + SPARE, ordered=ordered)

    def record(self, task: Task, streams: Streams) -> Record:
        """The record of one task. Raises only what ends the batch: `Cancelled`, `EngineClosed`."""
        if task.problem is not None:
            return failed(task, self._settings, task.problem)
        try:
            ask = understand(task.value, self._defaults)
            model = self._model(ask)
            results = [streams.answer(request, self._engine) for request in self._requests(ask)]
            return answered(task, self._settings, body_of(self._engine, ask, results, model))
        except (Cancelled, EngineClosed):
            raise
        except Exception as error:
            return failed(task, self._settings, problem_of(error))

    def _requests(self, ask: Ask) -> list[BatchRequest]:
        """What is to be answered; calls that are demanded have the form that the model writes them in."""
        form = held_to(self._engine, ask.calls, ask.requests[0].constraint)
        return [replace(request, constraint=form) for request in ask.all_requests]

    def _model(self, ask: Ask) -> str:
        """The name that the answer bears; refuses that of a model which is not there."""
        info, names = self._engine.info, self._defaults.model_names
        problem = other_model(ask.model, names, info)
        if problem is not None:
            raise refused("model_not_found", problem, status=404, param="model")
        return ask.model or (*names, info.name)[0]
