"""Log-probabilities of finished responses under a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, PrivateAttr

from flowrl.batch import PromptToken, Step, Token
from flowrl.node import Context
from flowrl.nodes._backend.model_node import ModelNode
from flowrl.partition import plan_micro_batches, shards
from flowrl.rows import Jagged


class Logprob(ModelNode):
    """Score every response token with the model's training weights, or with those of a frozen reference."""

    weights = "reads"

    max_tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens computed at a time, padding included; a shared prompt counts once. Bounds memory and changes no value."""

    _model: Any = PrivateAttr()

    class Out(NamedTuple):
        log_probs: Token[float]

    def setup(self, context: Context) -> None:
        from flowrl.nodes._backend.models import use_threads
        from flowrl.nodes._backend.trainer import model_of

        use_threads(context)
        self._context, self._model = context, model_of(context)

    def run(self, prompt_ids: PromptToken[int], response_ids: Token[int], temperature: Step[float]) -> Out:
        from flowrl.nodes._backend.logprob import shared_prompts, token_log_probs
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
                    log_probs, _ = token_log_probs(
                        self._model, prompts.take(index), responses.take(index), temperature.value
                    )
                found[np.isin(responses.row, index)] = log_probs.cpu().numpy()
        if num_ranks == 1:
            return self.Out(Token(rows, found, response_ids.offsets))
        own = np.flatnonzero(shards(costs, num_ranks, shared) == rank)
        scored = Jagged(found, responses.offsets).take(own)
        return self.Out(Token(rows.take(own), scored.values, scored.offsets))
