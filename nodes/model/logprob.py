"""Log-probabilities of finished responses under a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from flowrl.batch import PromptToken, Step, Token
from flowrl.nodes._backend.reading import Reading
from flowrl.rows import Jagged


class Logprob(Reading):
    """Score every response token with the model's training weights, or with those of a frozen reference."""

    class Out(NamedTuple):
        log_probs: Token[float]

    def run(self, prompt_ids: PromptToken[int], response_ids: Token[int], temperature: Step[float]) -> Out:
        from flowrl.nodes._backend.logprob import token_log_probs

        def scores(model: Any, prompts: Jagged, responses: Jagged) -> Any:
            return token_log_probs(model, prompts, responses, temperature.value)[0]

        return self.Out(self.read(prompt_ids, response_ids, scores))
