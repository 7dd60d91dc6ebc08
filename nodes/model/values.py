"""Values of finished responses under a critic: what return it expects before each token.

V of PPO (arXiv:1707.06347) and of generalised advantage estimation (arXiv:1506.02438, equation 11): `values[t]` is read
off the hidden states that predict token t, so it knows the prompt and the tokens before t, and neither t nor what
follows. Tokens of tools have a value too; `advantage.gae` passes over them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flowrl.batch import PromptToken, Token
from flowrl.nodes._backend.reading import Reading


class Values(Reading):
    """Give every response token the value of the state before it, by a model with `head: value`."""

    head = "value"
    toy_model = str(Path(__file__).parents[1] / "_backend" / "toy_classifier")

    class Out(NamedTuple):
        values: Token[float]

    def run(self, prompt_ids: PromptToken[int], response_ids: Token[int]) -> Out:
        from flowrl.nodes._backend.values import token_values

        return self.Out(self.read(prompt_ids, response_ids, token_values))
