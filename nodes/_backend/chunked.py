"""Log-probabilities and entropies of tokens from hidden states, without ever holding the logits of all tokens.

Logits are made for some tokens at a time, in two buffers of `SCORES_AT_A_TIME`, so that memory does not grow with
tokens times vocabulary. The backward pass makes them once more and turns them in place into their own gradient; nothing
but the hidden states is kept for it, and tokens without a gradient (masked, clipped, no advantage) are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from flowrl.nodes._backend.losses import entropy_of

Entropy = Literal["none", "value", "gradient"]
Found = tuple[Tensor, ...]
"""Log-probabilities and entropies, both (T,); 0 in the place of entropies that nobody asked for."""

SCORES_AT_A_TIME = 2**24
"""Logits in memory at a time: 64 MiB in float32."""
LEAST_LOG_PROB = -1.0e4
"""Stands for the log-probability of words that are impossible, whose own would make 0 times infinity."""


@dataclass(frozen=True)
class Scoring:
    """How what a head puts out becomes log-probabilities: log softmax(cap * tanh(scale * output / cap) / T)."""

    temperature: float
    entropy: Entropy = "none"
    scale: float = 1.0
    cap: float = math.inf
    scores_at_a_time: int = SCORES_AT_A_TIME

    def logits(self, output: Tensor) -> Tensor:
        """Divided by the temperature; changes `output`, which is float32 or wider, and may be it."""
        if math.isfinite(self.cap):
            return output.mul_(self.scale / self.cap).tanh() * (self.cap / self.temperature)  # autograd needs the tanh
        return output if self.temperature == self.scale else output.div_(self.temperature / self.scale)

    def slope(self, logits: Tensor) -> Tensor | None:
        """What `factor` must be multiplied by to give the derivative of these logits by the output; None is 1."""
        if not math.isfinite(self.cap):
            return None
        return (logits * (self.temperature / self.cap)).square_().neg_().add_(1.0)

    @property
    def factor(self) -> float:
        """Derivative of the logits by the output, where nothing caps it."""
        return self.scale / self.temperature

    def of(self, output: Tensor, targets: Tensor) -> Found:
        """Log-probabilities of the targets, and entropies, with gradients by torch."""
        return self.found(self.log_probs(output), targets)

    def log_probs(self, output: Tensor) -> Tensor:
        """Log-probabilities (T, V) of all words."""
        return torch.log_softmax(self.logits(output.to(_wide(output), copy=True)), dim=-1)

    def found(self, log_probs: Tensor, targets: Tensor) -> Found:
        """Log-probabilities of the targets, and entropies, by the log-probabilities (T, V) of all words."""
        chosen = log_probs.gather(1, targets[:, None])[:, 0]
        if self.entropy == "none":
            return chosen, torch.zeros_like(chosen)
        return chosen, entropy_of(log_probs if self.entropy == "gradient" else log_probs.detach())

    def num_parts(self, num_tokens: int, vocabulary: int) -> int:
        """Into how many parts so many tokens are cut, at least one."""
        return max(1, -(-num_tokens // max(1, self.scores_at_a_time // vocabulary)))


def head_log_probs(head: nn.Module, hidden: Tensor, targets: Tensor, scoring: Scoring, vocabulary: int) -> Found:
    """Log-probabilities of the targets (T,) under a head that makes logits of hidden states (T, H), and entropies.

    A plain linear layer has a backward pass of its own; any other head (LoRA, quantised) is run once more by torch.
    Under autocast the head computes in the narrow type; statistics are in float32 always.
    """
    if not _is_linear(head):
        return in_parts(lambda part, some: scoring.of(head.forward(part), some), hidden, targets, scoring, vocabulary)
    device = hidden.device.type
    operands = [hidden, head.weight] if head.bias is None else [hidden, head.weight, head.bias]
    if torch.is_autocast_enabled(device):
        operands = [operand.to(torch.get_autocast_dtype(device)) for operand in operands]
    found: Found = _Linear.apply(scoring, targets, *operands)  # type: ignore[no-untyped-call]
    return found


def in_parts(
    work: Callable[[Tensor, Tensor], tuple[Tensor, ...]], rows: Tensor, about: Tensor, scoring: Scoring, vocabulary: int
) -> tuple[Tensor, ...]:
    """Work on some rows (T, ...) at a time, and once more in the backward pass, so that nothing is kept for it."""
    num_parts = scoring.num_parts(len(rows), vocabulary)
    parts = zip(rows.tensor_split(num_parts), about.tensor_split(num_parts), strict=True)
    found = [checkpoint(work, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _is_linear(head: nn.Module) -> bool:
    """Whether the head is a whole matrix and maybe a bias; FSDP makes a subclass of it that computes the same."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and type(head.weight) is nn.Parameter


class _Linear(torch.autograd.Function):
    """Log-probabilities and entropies under a linear head."""

    @staticmethod
    def forward(ctx: Any, scoring: Scoring, targets: Tensor, hidden: Tensor, *head: Tensor) -> Found:
        """`hidden` (T, H), weight (V, H), maybe a bias (V,), all of one type."""
        log_probs = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        entropies = torch.zeros_like(log_probs)
        for at, logits, powers in _parts(scoring, torch.arange(len(hidden), device=hidden.device), hidden, *head):
            total = _exponentiate(logits, powers)
            log_probs[at] = logits.gather(1, targets[at, None])[:, 0] - total.log()
            if scoring.entropy != "none":
                # entr(e) is -e log e, and 0 for the 0 of an impossible word
                entropies[at] = total.log() + torch.special.entr(powers, out=powers).sum(dim=-1) / total
        ctx.scoring = scoring
        ctx.save_for_backward(targets, entropies, hidden, *head)
        if scoring.entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """By a logit z_j of a token: g (1[j is the target] - p_j) - e p_j (log p_j + entropy); g, e of its results."""
        targets, entropies, hidden, *head = ctx.saved_tensors
        scoring: Scoring = ctx.scoring
        of_log_probs, of_entropies = (gradient * scoring.factor for gradient in gradients)
        moved = of_log_probs != 0
        if scoring.entropy == "gradient":
            moved |= of_entropies != 0
        of_hidden = torch.zeros_like(hidden)
        of_head: list[Tensor | None] = [None] * len(head)
        for at, logits, powers in _parts(scoring, moved.nonzero()[:, 0], hidden, *head):
            slope, total = scoring.slope(logits), _exponentiate(logits, powers)
            if scoring.entropy == "gradient":
                logits.sub_(total.log()[:, None]).clamp_(min=LEAST_LOG_PROB).add_(entropies[at, None])
                pull = logits.mul_(of_entropies[at, None]).add_(of_log_probs[at, None]).div_(total[:, None])
            else:
                pull = (of_log_probs[at] / total)[:, None]
            by_logit = powers.mul_(pull).neg_()
            by_logit[torch.arange(len(at), device=at.device), targets[at]] += of_log_probs[at]
            by_output = (by_logit if slope is None else by_logit.mul_(slope)).to(hidden.dtype)
            of_hidden[at] = by_output @ head[0]
            if ctx.needs_input_grad[3]:
                of_head[0] = _added(of_head[0], by_output.t(), hidden[at])
            if len(head) == 2:
                of_head[1] = _added(of_head[1], by_output.t(), torch.ones_like(by_output[:, 0]))
        return None, None, of_hidden, *(None if each is None else each.to(hidden.dtype) for each in of_head)


def _parts(
    scoring: Scoring, tokens: Tensor, hidden: Tensor, weight: Tensor, *bias: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some of the tokens at a time, their logits, and as much memory again; the next part takes the place of both."""
    parts = tokens.tensor_split(scoring.num_parts(len(tokens), len(weight)))
    logits = hidden.new_empty(len(parts[0]), len(weight), dtype=_wide(hidden))
    spare = torch.empty_like(logits)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in parts:
            mine = logits[: len(part)]
            if mine.dtype == hidden.dtype:
                torch.mm(hidden[part], weight.t(), out=mine)
                for each in bias:
                    mine.add_(each)
            else:
                mine.copy_(linear(hidden[part], weight, *bias))
            yield part, scoring.logits(mine), spare[: len(part)]


def _exponentiate(logits: Tensor, powers: Tensor) -> Tensor:
    """Shift logits (T, V) so that none is above 0, put their exponentials into `powers`, and sum these: (T,)."""
    torch.exp(logits.sub_(logits.amax(dim=-1, keepdim=True)), out=powers)
    return powers.sum(dim=-1)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """The total and a product more, in float32 also where the factors are narrower."""
    if total is None:
        return (left @ right).to(_wide(left))
    if total.dtype != left.dtype or right.ndim == 1:
        return total.add_(left @ right)
    return total.addmm_(left, right)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
