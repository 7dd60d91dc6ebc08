"""Made-up trajectories for the tests of model nodes, with their columns as a rollout and its readers write them."""

from typing import Any

import numpy as np

from flowrl.batch import Batch, PromptToken, Step, Token
from flowrl.fields import FieldType
from flowrl.rows import Rows

TYPES = {
    "prompt_ids": FieldType("PromptToken", "int"),
    "response_ids": FieldType("Token", "int"),
    "loss_mask": FieldType("Token", "bool"),
    "temperature": FieldType("Step", "float"),
} | {name: FieldType("Token", "float") for name in ("advantages", "old_log_probs", "ref_log_probs")}


def trajectories(num_groups: int = 4, group_size: int = 3, seed: int = 0, longest: int = 9) -> Batch:
    """Groups of uneven rows: tokens of the shipped vocabulary, holes in the mask, one row without a trainable token."""
    generator = np.random.default_rng(seed)
    rows = Rows.of([f"u{group}" for group in range(num_groups) for _ in range(group_size)])
    prompts = [generator.integers(2, 20, generator.integers(1, 7)) for _ in range(num_groups)]
    lengths = generator.integers(1, longest + 1, len(rows))

    def token(draw: Any) -> Token[Any]:
        return Token.of(rows, [draw(length) for length in lengths])

    mask = token(lambda length: generator.random(length) < 0.8)
    mask.values[mask.jagged.row == 1] = False
    columns: dict[str, Any] = {
        "prompt_ids": PromptToken.of(rows, prompts),
        "response_ids": token(lambda length: generator.integers(2, 20, length)),
        "loss_mask": mask,
        "temperature": Step(rows, 0.7),
        "advantages": token(lambda length: generator.normal(size=length).astype(np.float32)),
        "old_log_probs": token(lambda length: -generator.random(length).astype(np.float32) * 4),
        "ref_log_probs": token(lambda length: -generator.random(length).astype(np.float32) * 4),
    }
    return Batch(rows, columns, TYPES)
