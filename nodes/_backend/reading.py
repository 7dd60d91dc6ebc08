"""What all readers of a model's weights have in common: micro-batches, shards, and a number for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import Field, PrivateAttr

from flowrl.batch import PromptToken, Token
from flowrl.node import Context
from flowrl.nodes._backend.model_node import ModelNode
from flowrl.partition import plan_micro_batches, shards
from flowrl.rows import Jagged

Scores = Callable[[Any, Jagged, Jagged], Any]
"""Of a model, prompts and responses: a tensor (T,) with a number for each response token, row by row."""


class Reading(ModelNode):
    """Base of the nodes that compute a number for every response token with a model's weights."""

    weights = "reads"

    max_tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens computed at a time, padding included; a shared prompt counts once. Bounds memory and changes no value."""

    _model: Any = PrivateAttr()

    def setup(self, context: Context) -> None:
        from flowrl.nodes._backend.models import use_threads
        from flowrl.nodes._backend.trainer import model_of

        use_threads(context)
        self._context, self._model = context, model_of(context)

    def read(self, prompt_ids: PromptToken[int], response_ids: Token[int], scores: Scores) -> Token[float]:
        """The numbers of this rank's rows, float32; every rank calls with all rows."""
        from flowrl.nodes._backend.logprob import shared_prompts
        from flowrl.nodes._backend.memory import memory_watched
        from flowrl.nodes._backend.parallel import without_gradients
        from flowrl.nodes._backend.trainer import as_read

        num_ranks, rank, max_tokens = self._context.num_ranks, self._context.rank, self.max_tokens_per_microbatch
        prompts, responses, rows = prompt_ids.jagged, response_ids.jagged, response_ids.rows
        costs, shared = prompts.lengths + responses.lengths, shared_prompts(self._model, prompts)
        found = np.zeros(len(responses.values), dtype=np.float32)
        with memory_watched(self._context, rows, max_tokens) as begin, as_read(self._context, self._model):
            for micro in plan_micro_batches(costs, num_ranks, rank, max_tokens, prompts=shared):
                index = np.sort(micro.rows)
                begin(index, micro.num_tokens)
                with without_gradients(self._model):
                    numbers = scores(self._model, prompts.take(index), responses.take(index))
                found[np.isin(responses.row, index)] = numbers.cpu().numpy()
        if num_ranks == 1:
            return Token(rows, found, response_ids.offsets)
        own = np.flatnonzero(shards(costs, num_ranks, shared) == rank)
        mine = Jagged(found, responses.offsets).take(own)
        return Token(rows.take(own), mine.values, mine.offsets)
