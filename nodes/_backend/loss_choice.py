"""The loss that `update.policy` is given by name: one of the library, or a function of the user's.

A function of one's own keeps the contract of `policy_losses`: its parameters name what it takes, each with its type,
and what is no column is a setting with a default. All of that is checked before launch; nothing here imports torch.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from flowrl.errors import nearest
from flowrl.functions import BadFunction, find_function
from flowrl.model import SettingError
from flowrl.nodes._backend import policy_losses
from flowrl.nodes._backend.terms import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = ("log_probs", "old_log_probs", "advantages", "mask", "row")
"""The columns that a loss may take."""
EVERY: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True)
class PolicyLoss:
    """A loss, and what may be chosen with it."""

    function: Callable[..., Any]
    aggregation: Aggregation = "token-mean"
    """What its paper does with the losses of tokens."""
    aggregations: tuple[Aggregation, ...] = EVERY
    """What may be done with them."""
    of_row: bool = False
    """All tokens of a trajectory have its one value."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """What the function takes, by name."""
        return signature(self.function).parameters

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its settings, with their defaults."""
        return {name: one.default for name, one in self.parameters.items() if name not in INPUTS}

    def __call__(
        self, columns: Mapping[str, Tensor], settings: Mapping[str, Any], importance_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Loss (T,) and (T,) bool where a clip decided it, if one can; `columns` are the `INPUTS`, 0 outside the mask.

        Importance weights (T,) multiply after clipping; a trajectory with one value has the geometric mean of its own.
        Raises `ValueError` where the function returns anything else.
        """
        found = self.function(**{name: columns[name] for name in INPUTS if name in self.parameters}, **settings)
        loss, clipped = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        for each in (loss,) if clipped is None else (loss, clipped):
            shape = getattr(each, "shape", None)
            if shape != (whole := columns["mask"].shape):
                what = type(each).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
                name = getattr(self.function, "__name__", "the loss")
                raise ValueError(f"{name}() returned {what}, not one of shape {tuple(whole)}: a value for each token")
        if importance_weights is None:
            return loss, clipped
        if self.of_row:
            logarithms = importance_weights.clamp(min=0.0).log()
            importance_weights = policy_losses.row_mean(logarithms, columns["mask"], columns["row"]).exp()
        return loss * importance_weights, clipped


LOSSES: Mapping[str, PolicyLoss] = {
    "clip": PolicyLoss(policy_losses.clip),
    "gspo": PolicyLoss(policy_losses.gspo, "seq-mean-token-mean"),
    "cispo": PolicyLoss(policy_losses.cispo),
    "gpg": PolicyLoss(policy_losses.gpg),
    "sapo": PolicyLoss(policy_losses.sapo, "seq-mean-token-mean"),
    "geo_mean": PolicyLoss(policy_losses.geo_mean, "seq-mean-token-mean", ("seq-mean-token-mean",), of_row=True),
    "reinforce": PolicyLoss(policy_losses.reinforce),
}


def loss_of(name: str) -> PolicyLoss:
    """The loss of the library, or of an import path or file. Raises `BadFunction` or `SettingError`."""
    if name in LOSSES:
        return LOSSES[name]
    loss = PolicyLoss(find_function(name))
    try:
        parameters = loss.parameters
    except (TypeError, ValueError) as error:
        raise BadFunction(f"Python does not say what '{name}' takes: write a function around it") from error
    if "log_probs" not in parameters:
        raise SettingError("loss", f"'{name}' does not take log_probs, so nothing would train", "log_probs: Tensor")
    for one in parameters.values():
        _check_parameter(name, one)
    _check_result(name, loss.function)
    for setting, default in loss.settings.items():
        if wrong := misfit(name, loss.function, setting, default):
            raise SettingError("loss", f"a default of '{name}' is none: {wrong}", "another default, or another type")
    return loss


def _check_parameter(name: str, one: Parameter) -> None:
    """Raise `SettingError` for what is neither a tensor of a known name nor a setting with a type and a default."""
    takes = f"'{name}' takes '{one.name}'"
    if one.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
        raise SettingError("loss", f"{takes} by no name", "name each parameter, and give it a type")
    if one.name in INPUTS:
        if _shown(one.annotation).rpartition(".")[2] != "Tensor" or one.default is not Parameter.empty:
            fact = f"{takes}, a column, as something else than a Tensor without a default"
            raise SettingError("loss", fact, f"{one.name}: Tensor")
    elif one.default is Parameter.empty:
        fix = nearest(one.name, INPUTS)
        fix = fix if "did you mean" in fix else f"a default, if it is a setting; the columns are {', '.join(INPUTS)}"
        raise SettingError("loss", f"{takes}, which is no column, and has no default", fix)
    elif one.annotation is Parameter.empty:
        raise SettingError("loss", f"{takes} without saying its type", f"{one.name}: float = {one.default!r}")


def _check_result(name: str, function: Callable[..., Any]) -> None:
    """Raise `SettingError` for what gives no tensor when it is called, or says that it gives something else."""
    kinds = {"an async function": iscoroutinefunction, "an async generator": isasyncgenfunction}
    kinds |= {"a generator": isgeneratorfunction, "a class": lambda found: isinstance(found, type)}
    for kind, is_one in kinds.items():
        if is_one(function):
            raise SettingError("loss", f"'{name}' is {kind}, no plain function", "def, with return and not yield")
    said = signature(function).return_annotation
    said = getattr(function, "__globals__", {}).get(said, said) if isinstance(said, str) else said
    is_pair = isinstance(said, type) and issubclass(said, tuple)
    if said not in (Signature.empty, Any) and not is_pair and "Tensor" not in str(said):
        fix = "-> Tensor, a loss for each token, or -> tuple[Tensor, Tensor] with those that a clip decided"
        raise SettingError("loss", f"'{name}' says that it returns {_shown(said)}, no Tensor", fix)


def misfit(name: str, function: Callable[..., Any], option: str, value: Any) -> str:
    """Why a setting of a user's loss cannot have a value, such as infinity and NaN; empty if it can.

    Raises `SettingError` where its type is none that YAML can write.
    """
    annotation = signature(function).parameters[option].annotation
    holder = types.SimpleNamespace(__annotations__={option: annotation})
    try:
        adapter = TypeAdapter[Any](get_type_hints(holder, getattr(function, "__globals__", {}))[option])
    except (NameError, TypeError, PydanticUserError) as error:
        fact = f"'{name}' takes '{option}', whose type {_shown(annotation)} YAML cannot write"
        raise SettingError("loss", fact, f"{option}: float, or another plain type") from error
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return f"'{option}' is {_shown(annotation)}, not {value!r}"
    infinite = isinstance(value, float) and not math.isfinite(value)
    return f"'{option}' is a finite number, not {value}" if infinite else ""


def _shown(annotation: Any) -> str:
    """A type as it is written."""
    return annotation.strip("\"'") if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
