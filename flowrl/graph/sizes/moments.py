"""What optimizers keep of each parameter that they train, as the classes of torch do; a test compares each."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.model import OptimizerSpec

_ALWAYS: Mapping[str, int] = {
    "Adadelta": 2, "Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "ASGD": 1, "NAdam": 2, "RAdam": 2, "RMSprop": 1,
    "Rprop": 2, "SGD": 0,
}  # fmt: skip
"""Numbers beside each parameter, as wide as it is: running means and the like."""
_ASKED: Mapping[str, tuple[str, ...]] = {
    "Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("centered", "momentum"), "SGD": ("momentum",),
}  # fmt: skip
"""Options that keep one more each."""
_TORCH = "torch.optim"


def class_of(spec: OptimizerSpec) -> str:
    """The optimizer's class, without its module."""
    return spec.import_path.rpartition(":")[2]


def num_moments(spec: OptimizerSpec) -> int | None:
    """Numbers that the optimizer keeps of each parameter; None for one that is known only once it runs.

    That is one of the user's, and Adafactor, which keeps sums of rows and columns.
    """
    name = class_of(spec)
    if spec.import_path != f"{_TORCH}:{name}" or name not in _ALWAYS:
        return None
    return _ALWAYS[name] + sum(bool(spec.options.get(option)) for option in _ASKED.get(name, ()))
