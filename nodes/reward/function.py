"""A function of the user's as a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, PrivateAttr, field_validator, model_validator

from flowrl.batch import Json, Prompt, Sample
from flowrl.functions import BadFunction, find_function
from flowrl.model import SettingError
from flowrl.node import Context, Node
from flowrl.nodes._backend.answers import CALLS_AHEAD, BadAnswer, Crew, judgement, scored


def same_text(response: str, answer: str) -> float:
    """What a reward function looks like: its parameters name what it reads."""
    return float(response.strip() == str(answer).strip())


class Function(Node):
    """Score with a function of yours, whose parameters name what it takes: response, prompt, answer and further fields.

    It may be async, take one sample or a list of them, and return a number, or a dict with the score and anything else.
    Whatever is no finite number leaves the sample without a score, and so does an exception.
    """

    call: str = Field(min_length=1, examples=["flowrl.nodes.reward.function:same_text"])
    """The function: `./my_rewards.py:score`, relative to the YAML file, or `my_pkg.rewards:score`."""
    batch: bool = False
    """Give it lists, one value for each sample, and take a list back; a call that fails is tried sample by sample."""
    batch_size: int = Field(64, ge=1)
    """Samples of one call at most, with `batch`."""
    concurrency: int = Field(16, ge=1)
    """Calls of an async function that run at once on a worker; without `batch`."""
    reward_key: str = "score"
    """Where it returns a dict: the key of the score. The rest becomes `reward_info`."""

    _function: Callable[..., Any] = PrivateAttr()
    _names: Sequence[str] = PrivateAttr(())
    _timeout: float | None = PrivateAttr(None)
    _crew: Crew | None = PrivateAttr(None)

    class Out(NamedTuple):
        reward: Sample[float]
        reward_info: Sample[Json]

    @field_validator("call")
    @classmethod
    def _can_be_called(cls, call: str) -> str:
        _parameters(find_function(call), call)
        return call

    @model_validator(mode="after")
    def _found(self) -> Self:
        # Now: the text of a user's file travels beside the parameters, and is there only while they are read.
        self._function = find_function(self.call)
        return self

    @model_validator(mode="after")
    def _every_setting_counts(self) -> Self:
        name, at_once = self.call.rpartition(":")[2], _is_async(self._function) and not self.batch
        unused = {"concurrency": f"it is of an async {name}() without batch"} if not at_once else {}
        for key, fact in (unused if self.batch else {"batch_size": "it is of batch: true", **unused}).items():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise SettingError((key, "batch", "call"), f"{key} has no effect here: {fact}", f"leave {key} out")
        return self

    def needs(self) -> dict[str, bool]:
        parameters = _parameters(self._function, self.call)
        found: dict[str, bool] = {}
        if not _takes_any(parameters) and not _further(parameters):
            found |= {"columns": False, "samples": False}
        for port in ("prompt", "answer"):
            if port in parameters and parameters[port].default is inspect.Parameter.empty:
                found[port] = True
            elif port not in parameters and not _takes_any(parameters):
                found[port] = False
        return found

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        parameters = _parameters(self._function, self.call)
        function = f"{self.call.rpartition(':')[2]}()"
        named = [name for port in ("columns", "samples") for name in reads.get(port, ())]
        given = {*(reads.keys() - {"columns", "samples"}), *named}
        for name, parameter in parameters.items():
            if (
                parameter.default is parameter.empty
                and parameter.kind is not parameter.VAR_KEYWORD
                and name not in given
            ):
                return (
                    f"{function} takes '{name}', which the node does not read; reads: {{columns: [{name}]}} for a "
                    f"column of the data, reads: {{samples: [{name}]}} for a value of each sample"
                )
        strange = [name for name in named if name not in parameters]
        if strange and not _takes_any(parameters):
            return f"{function} takes no '{strange[0]}'; it takes {', '.join(parameters) or 'nothing'}"
        return ""

    def rows_per_call(self) -> int:
        if self.batch:
            return self.batch_size
        return CALLS_AHEAD * self.concurrency if _is_async(self._function) else 1

    def setup(self, context: Context) -> None:
        self._names = [name for port in ("columns", "samples") for name in context.reads.get(port, ())]
        self._timeout, self._crew = context.timeout, Crew()

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()

    def run(
        self,
        response: Sample[str],
        prompt: Prompt[Json] | None = None,
        answer: Prompt[Json] | None = None,
        columns: list[Prompt[Json]] | None = None,
        samples: list[Sample[Json]] | None = None,
    ) -> Out | Iterator[Out]:
        more = [*(column.per_sample(response) for column in columns or ()), *(samples or ())]
        parameters = _parameters(self._function, self.call)
        given: dict[str, list[Any]] = {"response": list(response)}
        given |= {"prompt": list(prompt.per_sample(response))} if prompt is not None else {}
        given |= {"answer": list(answer.per_sample(response))} if answer is not None else {}
        given |= {name: list(column) for name, column in zip(self._names or _further(parameters), more, strict=False)}
        given = {name: values for name, values in given.items() if name in parameters or _takes_any(parameters)}
        if self.batch:
            return self._judged_together(response, given)
        if _is_async(self._function):
            return self._judged_at_once(response, given)
        return self._out(response, lambda position: self._awaited(self._function(**_row(given, position))))

    def _judged_together(self, response: Sample[str], given: Mapping[str, list[Any]]) -> Out:
        values = self._awaited(self._function(**given))
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise BadAnswer(f"it returned {type(values).__name__}, not a list with a value for each sample")
        if len(values) != len(response):
            raise BadAnswer(f"it returned {len(values)} values for {len(response)} samples")
        return self._out(response, lambda position: values[position])

    def _judged_at_once(self, response: Sample[str], given: Mapping[str, list[Any]]) -> Iterator[Out]:
        assert self._crew is not None, "setup comes before run"

        async def judge(position: int) -> tuple[float, Any]:
            return judgement(await self._function(**_row(given, position)), self.reward_key)

        for rows, found in self._crew.judged(response.rows, judge, self.concurrency, self._timeout):
            yield self.Out(Sample(rows, [found[0]]), Sample(rows, [found[1]]))

    def _out(self, response: Sample[str], value_of: Callable[[int], Any]) -> Out:
        found = scored(response.rows, lambda position: judgement(value_of(position), self.reward_key))
        scores, more = zip(*(one or (np.nan, None) for one in found), strict=True) if found else ((), ())
        return self.Out(Sample(response.rows, scores), Sample(response.rows, more))

    def _awaited(self, value: Any) -> Any:
        """The value, also where a plain function returns something to wait for."""
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        return (self._crew or Crew()).run(wait())


def _row(given: Mapping[str, list[Any]], position: int) -> dict[str, Any]:
    return {name: values[position] for name, values in given.items()}


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _further(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """What a function takes beside the fields that every pipeline has."""
    named = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]
    return [name for name in named if name not in ("response", "prompt", "answer")]


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _parameters(function: Callable[..., Any], call: str) -> dict[str, inspect.Parameter]:
    """What a function takes, by name. Raises `BadFunction` for what cannot be given by name."""
    try:
        found = dict(inspect.signature(function).parameters)
    except ValueError as error:
        raise BadFunction(f"Python does not say what '{call}' takes: write a function around it") from error
    for name, parameter in found.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise BadFunction(f"'{call}' takes '{name}' by position; what it takes is given by name")
    return found
