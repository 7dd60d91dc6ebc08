"""The settings of vLLM's engine, known without importing vLLM: its source says them.

So `flowrl check` can refuse an unknown one in milliseconds; where vLLM is not installed nothing is known.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.errors import nearest
from flowrl.model import SettingError

VLLM_MAX_TEMPERATURE = 2
OURS: Mapping[str, str] = {
    "model": "models.<name>.path",
    "tokenizer": "models.<name>.tokenizer",
    "tokenizer_revision": "models.<name>.revision",
    "revision": "models.<name>.revision",
    "code_revision": "models.<name>.revision",
    "trust_remote_code": "models.<name>.trust_remote_code",
    "seed": "run.seed",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "tensor_parallel",
    "data_parallel_size": "more workers in the pool",
    "logprobs_mode": "nothing: log-probabilities are those that the trainer computes",
    "weight_transfer_config": "transport of sync.weights",
    "enable_sleep_mode": "nothing: it follows from the pools",
    "skip_tokenizer_init": "nothing: prompts and responses travel as token ids",
}
"""Settings of vLLM that flowrl makes itself, and where they are made."""

_SIMPLE: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}


@cache
def known_options() -> Mapping[str, str]:
    """Name and type (as written) of every setting of vLLM's engine; empty where vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return {}
    source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    return {
        statement.target.id: ast.unparse(statement.annotation)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise `SettingError` for an option that is flowrl's to make, unknown to vLLM, or of another type."""
    known = known_options()
    for name, value in options.items():
        if name in OURS:
            raise SettingError("engine_options", f"'{name}' is not set here", f"remove '{name}'; write {OURS[name]}")
        if known and name not in known:
            near = nearest(name, known) or "an option of vLLM's EngineArgs"
            raise SettingError("engine_options", f"vLLM has no engine option '{name}'", near)
        wanted = [part.strip() for part in known.get(name, "").split("|")]
        if not all(part in _SIMPLE for part in wanted):
            continue
        allowed = tuple(kind for part in wanted for kind in _SIMPLE[part])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            shown = " or ".join("null" if part == "None" else part for part in wanted)
            raise SettingError("engine_options", f"vLLM's '{name}' is {shown}, not {value!r}", f"{name}: {shown}")
