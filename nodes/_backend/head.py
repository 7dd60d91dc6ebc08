"""Log-probabilities in the place of a model's logits: its head is given one token, and scores those that are wanted.

This happens in hooks, inside the forward passes of the head and of the model: there weights are whole (FSDP), autocast
is on, and what is returned is what the hooks and wrappers of a parallel model look at.

Behind its head a model may scale logits, or cap them. What it does is found out once, by handing it logits of our
choice; a model that does something else must make all logits itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowrl.nodes._backend.chunked import Scoring, head_log_probs

Make = Callable[[nn.Module, Tensor, int], Tensor]
"""Of a head, the hidden states (rows, columns, H) that it was given, and the number of words: what it puts out."""


class Wanted(NamedTuple):
    """Tokens that are asked for, each an int64 (T,)."""

    row: Tensor
    back: Tensor
    """How many columns before the end of the row lies what predicts the token; 1 is the last column."""
    targets: Tensor
    """The tokens."""
    at: Tensor
    """Where each stands among all response tokens."""

    def of(self, states: Tensor) -> Tensor:
        """What predicts each token: (rows, columns, ...) -> (T, ...)."""
        return states.flatten(0, 1).index_select(0, (self.row + 1) * states.shape[1] - self.back)


class Tail(NamedTuple):
    """What a model makes of the output of its head: cap * tanh(scale * output / cap)."""

    scale: float
    cap: float


_TAILS: WeakKeyDictionary[nn.Module, Tail | None] = WeakKeyDictionary()


def tail_of(model: nn.Module, call: Callable[[], Any]) -> Tail | None:
    """What the model makes of the output of its head; None if that is something else, or it has none.

    `call` runs the model on one token: once in the life of a model, on every rank at the same time.
    """
    module = unwrapped(model)
    if module not in _TAILS:
        with torch.no_grad():
            _TAILS[module] = _probed(module, call)
    return _TAILS[module]


def scored(model: nn.Module, call: Callable[[], Any], wanted: Wanted, scoring: Scoring) -> Any:
    """What `call` of the model returns, with log-probabilities and entropies (1, T, 2) in the place of its logits."""

    def find(head: nn.Module, hidden: Tensor, num_words: int) -> tuple[Tensor, ...]:
        return head_log_probs(head, wanted.of(hidden), wanted.targets, scoring, num_words)

    return read_off(model, call, find)


def read_off(
    model: nn.Module, call: Callable[[], Any], find: Callable[[nn.Module, Tensor, int], tuple[Tensor, ...]]
) -> Any:
    """What `call` of the model returns, with the columns (T,) that are found at its head in the place of its logits.

    `find` is given what `Make` is. They come as one (1, T, number of columns).
    """
    made: list[Tensor] = []

    def make(head: nn.Module, hidden: Tensor, num_words: int) -> Tensor:
        found = find(head, hidden, num_words)
        made.append(torch.stack([column[None] for column in found], dim=-1))  # no view: FSDP watches this tensor
        return made[-1]

    def hand_out(_: nn.Module, __: Any, output: Any) -> Any:
        output.logits = made[-1]  # as they were before the model treated them as logits
        return output

    module = unwrapped(model)
    head = head_of(module)
    assert head is not None, "what has no head says nothing of tokens"
    # Before other hooks: FSDP must see what its backward pass begins with.
    handle = module.register_forward_hook(hand_out, prepend=True)
    try:
        with _output_replaced(head, make):
            return call()
    finally:
        handle.remove()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what makes it parallel."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


def head_of(module: nn.Module) -> nn.Module | None:
    """What makes logits of hidden states."""
    find = getattr(module, "get_output_embeddings", None)
    found = None if find is None else find()
    return found if isinstance(found, nn.Module) else None


@contextmanager
def _output_replaced(head: nn.Module, make: Make) -> Iterator[None]:
    """While this lasts, the head computes one token, and puts out what `make` does."""
    given: list[Tensor] = []

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) != 1 or args[0].ndim != 3:
            return None
        given.append(args[0])
        return (args[0][:1, :1],)

    def replace(head: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        return make(head, given.pop(), output.shape[-1]) if given else None

    handles = [head.register_forward_pre_hook(take), head.register_forward_hook(replace, prepend=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _probed(module: nn.Module, call: Callable[[], Any]) -> Tail | None:
    head, offered = head_of(module), []

    def offer(_: nn.Module, hidden: Tensor, num_words: int) -> Tensor:
        probe = torch.linspace(-30.0, 30.0, num_words, device=hidden.device)
        probe[0], probe[-1] = math.inf, 1.0
        offered.append((probe, probe.clone().expand(*hidden.shape[:-1], -1).clone()))
        return offered[-1][1]

    if head is None:
        return None
    with _output_replaced(head, offer):
        output = getattr(call(), "logits", None)
    if len(offered) != 1 or not isinstance(output, Tensor) or output.shape != offered[0][1].shape:
        return None
    probe, given = offered[0]
    treated = output.flatten(0, -2)[0].float()
    limit, scale = float(treated[0]), float(treated[-1])
    if math.isinf(limit):
        tail, expected = Tail(scale, math.inf), probe * scale
    else:
        tail, expected = Tail(1.0, limit), limit * torch.tanh(probe / limit)
    fits = tail.scale > 0 and torch.allclose(treated, expected, rtol=1e-5, atol=1e-6)
    return tail if fits and torch.equal(given[0, 0], probe) else None  # what it changes in place cannot be handed out
