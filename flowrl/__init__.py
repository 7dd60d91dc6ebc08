"""flowrl: LLM reinforcement learning as a typed dataflow graph.

`from flowrl import Node, Sample, Token` is all that a node needs; `flowrl.load("pipeline.yaml").run()` runs a pipeline.
Names are imported on first use, so that `flowrl check` needs neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.batch import Batch, Json, Prompt, PromptToken, Sample, Step, Token
    from flowrl.errors import PipelineError, Problem, RunError
    from flowrl.evaluation import Evaluation
    from flowrl.fields import FieldType
    from flowrl.gate import Gate
    from flowrl.metrics import failure, metric
    from flowrl.node import Context, Node
    from flowrl.pipeline import Pipeline, load
    from flowrl.rows import Jagged, Rows

__version__ = "0.1.0"

_HOME = {
    "flowrl.batch": ("Batch", "Json", "Prompt", "PromptToken", "Sample", "Step", "Token"),
    "flowrl.errors": ("PipelineError", "Problem", "RunError"),
    "flowrl.evaluation": ("Evaluation",),
    "flowrl.fields": ("FieldType",),
    "flowrl.gate": ("Gate",),
    "flowrl.metrics": ("failure", "metric"),
    "flowrl.node": ("Context", "Node"),
    "flowrl.pipeline": ("Pipeline", "load"),
    "flowrl.rows": ("Jagged", "Rows"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Batch", "Context", "Evaluation", "FieldType", "Gate", "Jagged", "Json", "Node", "Pipeline", "PipelineError",
    "Problem", "Prompt", "PromptToken", "Rows", "RunError", "Sample", "Step", "Token", "failure", "load", "metric",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        # a submodule that is not loaded yet is found by the import system after this error
        raise AttributeError(f"module 'flowrl' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
