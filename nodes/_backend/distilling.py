"""How far a model is from its teacher at each token of its own responses, over all words and not the drawn one alone.

The reverse divergence KL(student || teacher) of the distributions of the next token; a gradient flows through the
student only. Of the teacher what its head would read is kept for all tokens of a
micro-batch; logits of both are made for some tokens at a time, and once more in the backward pass (`chunked`).

Where one model knows more words than the other, as vocabularies are padded to different sizes, those that both know
count: both distributions are of them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flowrl.node import Context
from flowrl.nodes._backend.chunked import LEAST_LOG_PROB, SCORES_AT_A_TIME, Entropy, Scoring, in_parts
from flowrl.nodes._backend.head import Wanted, head_of, read_off, unwrapped
from flowrl.nodes._backend.inputs import flat
from flowrl.nodes._backend.logprob import scores_of, tail_at
from flowrl.nodes._backend.trainer import as_read, model_of, place
from flowrl.rows import Jagged

LOGITS_AT_A_TIME = SCORES_AT_A_TIME // 4
"""Fewer than for log-probabilities alone, as several copies of them are needed."""


def reverse_kl(log_probs: Tensor, teacher: Tensor, top_k: int | None = None) -> Tensor:
    """KL(student || teacher) (T,) of log-probabilities (T, V) of the same words.

    With `top_k` it is that over the words that the student finds likeliest, and one word that stands for the rest: no
    more than over all words, as much at V - 1, and no less with a higher `top_k` (log-sum inequality). A word that
    is impossible counts as one of `LEAST_LOG_PROB`, so that the divergence and its gradient are finite.
    """
    log_probs, teacher = log_probs.clamp(min=LEAST_LOG_PROB), teacher.clamp(min=LEAST_LOG_PROB)
    if top_k is not None and top_k < log_probs.shape[-1] - 1:
        likeliest = log_probs.detach().topk(top_k, dim=-1).indices
        log_probs, teacher = (_with_rest(each, likeliest) for each in (log_probs, teacher))
    return (log_probs.exp() * (log_probs - teacher)).sum(dim=-1)


def _with_rest(log_probs: Tensor, chosen: Tensor) -> Tensor:
    """Log-probabilities (T, k + 1) of the chosen words (T, k), and of all others together."""
    others = log_probs.scatter(1, chosen, LEAST_LOG_PROB).logsumexp(dim=-1, keepdim=True)
    return torch.cat([log_probs.gather(1, chosen), others], dim=-1)


class Teacher:
    """A frozen model that says what it would have at each token of a student's responses."""

    def __init__(self, context: Context) -> None:
        """The context is that of the worker's node, with the teacher as its model."""
        self._context, self.model = context, model_of(context)

    def read(self, prompts: Jagged, responses: Jagged) -> Tensor:
        """What its head would read at each response token: (T, H); logits (T, V) of a model that makes all of them."""

        def score(call: Callable[[], Any], wanted: Wanted) -> tuple[Any, tuple[Tensor, ...]]:
            if tail_at(self.model) is None:
                output = call()
                return output, (wanted.of(output.logits),)
            output = read_off(self.model, call, lambda _, hidden, __: (wanted.of(hidden),))
            return output, output.logits[0].unbind(-1)

        with torch.no_grad(), as_read(self._context, self.model):
            (states,) = scores_of(self.model, prompts, responses, score, 1)
        return states

    def log_probs(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (T, V) of all words, of what `read` has found at these tokens."""
        tail, head = tail_at(self.model), head_of(unwrapped(self.model))
        with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
            if tail is None or head is None:
                return Scoring(temperature).log_probs(states)
            # Where it is the model that trains with its adapters off, so is its head.
            output = getattr(head, "base_layer", head).forward(states)
            return Scoring(temperature, scale=tail.scale, cap=tail.cap).log_probs(output)

    def place(self, awake: bool) -> None:
        """Keep it on its device, or in host memory while others need that, if it is to be moved."""
        place(self._context, awake)

    def rest(self) -> None:
        """After a step: each rank keeps its own part of the head alone, if the model is spread over them."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()


@dataclass(frozen=True)
class _Comparison:
    """Of what a student says of tokens and what its teacher does."""

    scoring: Scoring
    teacher: Teacher
    states: Tensor
    """What the teacher has read at all response tokens."""
    targets: Tensor
    """The tokens."""
    temperature: float
    """Of the teacher."""
    top_k: int | None

    def score(self, model: nn.Module, call: Callable[[], Any], wanted: Wanted) -> tuple[Any, tuple[Tensor, ...]]:
        """What `call` of the student returns; log-probabilities, entropies and divergences of the wanted tokens."""
        tail = tail_at(model)
        if tail is None:
            output = call()
            logits = wanted.of(output.logits)
            return output, self._found(lambda part: part, self.scoring, logits, wanted.at, logits.shape[-1])
        scoring = replace(self.scoring, scale=tail.scale, cap=tail.cap)
        output = read_off(
            model,
            call,
            lambda head, hidden, num: self._found(head.forward, scoring, wanted.of(hidden), wanted.at, num),
        )
        return output, output.logits[0].unbind(-1)

    def _found(
        self, head: Callable[[Tensor], Tensor], scoring: Scoring, states: Tensor, at: Tensor, num_words: int
    ) -> tuple[Tensor, ...]:
        return in_parts(partial(self._of_part, head, scoring), states, at, scoring, num_words)

    def _of_part(
        self, head: Callable[[Tensor], Tensor], scoring: Scoring, states: Tensor, at: Tensor
    ) -> tuple[Tensor, ...]:
        log_probs = scoring.log_probs(head(states))
        teacher = self.teacher.log_probs(self.states[at], self.temperature)
        both = min(log_probs.shape[-1], teacher.shape[-1])
        divergence = reverse_kl(_of_words(log_probs, both), _of_words(teacher, both), self.top_k)
        return *scoring.found(log_probs, self.targets[at]), divergence


def _of_words(log_probs: Tensor, num_words: int) -> Tensor:
    """Log-probabilities (T, V) among the first words alone."""
    return log_probs if log_probs.shape[-1] == num_words else torch.log_softmax(log_probs[:, :num_words], dim=-1)


def token_divergences(
    model: nn.Module,
    teacher: Teacher,
    prompts: Jagged,
    responses: Jagged,
    temperature: float,
    entropy: Entropy = "none",
    top_k: int | None = None,
    teacher_temperature: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and divergence from the teacher, each (T,) float32, of all response tokens, row by row.

    The first two are those of `token_log_probs`; the divergence is that of `reverse_kl`, with the teacher at the same
    temperature unless it has one of its own.
    """
    states = teacher.read(prompts, responses)
    scoring = Scoring(temperature, entropy, scores_at_a_time=LOGITS_AT_A_TIME)
    targets = torch.from_numpy(flat(responses)).to(states.device)
    compared = _Comparison(scoring, teacher, states, targets, teacher_temperature or temperature, top_k)
    log_probs, entropies, divergences = scores_of(model, prompts, responses, partial(compared.score, model), 3)
    return log_probs, entropies, divergences
