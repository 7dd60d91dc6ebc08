"""Floating-point operations of the model nodes in one step, if all prompts and all responses are equally long.

A token that goes through the layers costs 2 operations (multiply, add) for each weight of the layers' matrices, and
4 x layers x heads x head_dim for each token that it attends to, itself included: scores and weighted sum. (Kaplan et
al. 2020, arXiv:2001.08361, section 2.1; PaLM, arXiv:2204.02311, appendix B. Both count attention over the whole
sequence; here a token attends to those before it, so its context is on average half of that.) A token whose logits
are computed costs 2 x hidden x vocabulary more: one for each response token, none for the rest of the prompt. The
value of a token, in their place, costs 2 x hidden.
A backward pass costs two forward passes; what is computed once more for it, to save memory (logits always), is not
counted. Where only adapters train (LoRA) weights have no gradients, and it costs one, but of attention two. Adapters,
embeddings, norms, softmax and the optimizer are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.graph.sizes.batches import Passes
from flowrl.graph.sizes.lengths import Lengths


@dataclass(frozen=True)
class Work:
    """What a node computes with its model in a step in which it runs, all workers together."""

    node: str
    model: str
    num_tokens: int
    """Tokens that go through the layers in one pass."""
    num_attended: float
    """Tokens attended to, summed over those."""
    num_logits: int
    """Tokens whose logits are computed."""
    num_passes: int
    """1 for a forward pass, 3 with its backward pass, 2 where only adapters train; times the epochs."""
    flops: int | Unknown
    """Those of models that are read beside included. Unknown where the model is; 0 where a script takes its place."""


def work(
    node: str, model: str, architecture: Architecture | Unknown, prompts: int, rows: int, lengths: Lengths, times: int,
    attention_times: int | None = None,
) -> Work:  # fmt: skip
    """Reading `prompts` prompts and `rows` responses; the last token of a response predicts nothing and is not read."""
    prompt, fed = lengths.prompt_tokens, lengths.response_tokens - 1
    tokens = prompts * prompt + rows * fed
    attended = prompts * prompt * (prompt + 1) / 2 + rows * (fed * prompt + fed * (fed + 1) / 2)
    logits = rows * lengths.response_tokens
    flops: int | Unknown = architecture if isinstance(architecture, Unknown) else 0
    if isinstance(architecture, Architecture):
        weights, attention = _forward(architecture, tokens, attended, logits)
        flops = round(times * weights + (attention_times or times) * attention)
    return Work(node, model, tokens, attended, logits, times, flops)


def forward_flops(architecture: Architecture, tokens: int, attended: float, logits: int) -> float:
    """Of one forward pass of so many tokens, that attend to so many in all, and of which so many have logits."""
    return sum(_forward(architecture, tokens, attended, logits))


def _forward(architecture: Architecture, tokens: int, attended: float, logits: int) -> tuple[int, float]:
    """Of a forward pass, the part with weights, and that of the attention, which has none."""
    width = architecture.num_heads * architecture.head_dim
    weights = 2 * (architecture.num_layer_weights * tokens + architecture.hidden * architecture.num_outputs * logits)
    return weights, 4 * architecture.num_layers * width * attended


def work_of_passes(
    cut: Passes,
    model: str,
    architecture: Architecture | Unknown,
    lengths: Lengths,
    adapters: bool = False,
    beside: Sequence[Architecture | Unknown] = (),
) -> Work:
    """Log-probabilities (one forward pass) or an update (forward and backward, in each epoch), of `adapters` alone.

    Models that are read beside the node's own take one forward pass in each epoch.
    """
    times = (2 if adapters else 3) * cut.epochs if cut.updates else 1
    attention = 3 * cut.epochs if cut.updates else 1
    found = work(cut.node, model, architecture, cut.prompts_read, cut.rows_read, lengths, times, attention)
    for other in beside:
        more = work(cut.node, model, other, cut.prompts_read, cut.rows_read, lengths, cut.epochs).flops
        if isinstance(more, Unknown) or isinstance(found.flops, Unknown):
            return replace(found, flops=found.flops if isinstance(found.flops, Unknown) else more)
        found = replace(found, flops=found.flops + more)
    return found


def work_of_rollout(
    node: str, model: str, architecture: Architecture | Unknown, prompts: int, group: int, lengths: Lengths
) -> Work:
    """Each prompt read once for its group, then a token at a time for each session.

    An upper bound: sessions of a group that have drawn the same tokens so far are computed once.
    """
    return work(node, model, architecture, prompts, prompts * group, lengths, 1)
