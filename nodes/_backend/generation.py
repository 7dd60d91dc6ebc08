"""The `transformers` engine: generation in the worker, on a copy of the weights of its own.

Sessions that have the same prompt and have drawn the same tokens so far are one *branch*: it is computed once, however
many sessions share it. So a prompt is prefilled once for its whole group, and a confident policy costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.model import ModelSpec
from flowrl.nodes._backend.chat import ChatFormat, Prompt, encode_prompts
from flowrl.nodes._backend.drawn import Drawn
from flowrl.nodes._backend.engine import Finished, Idle, Request, Sampling, Wanted, refusal, require_ready
from flowrl.nodes._backend.loading import Loading
from flowrl.nodes._backend.models import end_tokens, load_model, load_tokenizer
from flowrl.nodes._backend.weights import Bucket, Update, name_of
from flowrl.rows import Array, Jagged


class Prefix(NamedTuple):
    """What the model has seen of B branches, and what it expects next."""

    cache: Any
    """Keys and values (`transformers.DynamicCache`)."""
    mask: Tensor
    """(B, columns) 1 where a column holds a token: prompts are padded on the left."""
    length: Tensor
    """(B,) tokens seen."""
    logits: Tensor
    """(B, vocabulary) of the next token."""


class TransformersEngine(Idle):
    """See the module docstring; implements `_backend.engine.Engine`."""

    def __init__(self, spec: ModelSpec, device: str, chat: ChatFormat, max_sequences: int) -> None:
        self._model = load_model(spec, device)
        self._tokenizer = load_tokenizer(spec)
        self._device, self._max_sequences, self._version = device, max_sequences, 0
        self._chat = chat
        self._loading: Loading | None = None
        config = self._model.config.get_text_config()
        sources = (self._model.generation_config, config, self._tokenizer)
        self._end_tokens = end_tokens(*(getattr(source, "eos_token_id", None) for source in sources))
        limit = getattr(config, "max_position_embeddings", None)
        self._max_length = int(limit or np.iinfo(np.int64).max)

    def version(self) -> int:
        """Version of the weights in use; 0 before the first update."""
        return self._version

    def wants(self) -> Wanted:
        """Weights of its own type."""
        return Wanted(name_of(self._model.dtype))

    def begin_update(self, update: Update) -> None:
        """See whether the weights will fit."""
        self._loading = Loading(self._model, update.manifest)

    def load_bucket(self, bucket: Bucket) -> None:
        """Copy the weights in."""
        assert self._loading is not None, "an update begins first"
        self._loading.load(bucket)

    def finish_update(self, version: int) -> None:
        """Compare checksums where the sender made some, and generate with the new weights."""
        assert self._loading is not None, "an update begins first"
        self._loading.finish()
        self._loading, self._version = None, version

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, through the chat template where the tokenizer has one."""
        return encode_prompts(self._tokenizer, prompts, self._chat)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        """Requests as they finish; at most `max_sequences` sessions (or one request) are worked on at a time."""
        require_ready(updating=self._loading is not None)
        wave: list[int] = []
        num_sessions = 0
        for position, request in enumerate(requests):
            if refused := refusal(position, request, self._max_length):
                yield [refused]
                continue
            if wave and num_sessions + len(request.seeds) > self._max_sequences:
                yield from self._generate(wave, requests, sampling)
                wave, num_sessions = [], 0
            wave.append(position)
            num_sessions += len(request.seeds)
        if wave:
            yield from self._generate(wave, requests, sampling)

    def _generate(
        self, wave: Sequence[int], requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[list[Finished]]:
        prompts = Jagged.of([requests[position].prompt for position in wave], np.int64)
        limits = np.minimum(sampling.max_tokens, self._max_length - prompts.lengths)
        drawn = Drawn([requests[position] for position in wave], limits, int(limits.max()))
        prefix, branch = self._prefill(prompts), drawn.request
        active, num_open = np.arange(len(branch)), drawn.num_sessions.copy()
        for step in range(int(limits.max())):
            ids, log_probs = sample(prefix.logits, branch, drawn.uniform[active, step], sampling.temperature)
            drawn.ids[active, step], drawn.log_probs[active, step] = ids, log_probs
            drawn.versions[active, step] = self._version
            stopped = np.isin(ids, self._end_tokens) | drawn.texts_end(active, step, sampling.stop, self._decode)
            drawn.stopped[active] = stopped
            ended = stopped | (step + 1 >= drawn.limit[active])
            drawn.length[active[ended]] = step + 1
            num_open -= np.bincount(drawn.request[active[ended]], minlength=len(wave))
            touched = np.unique(drawn.request[active[ended]])
            yield [self._finished(wave, drawn, request) for request in touched[num_open[touched] == 0].tolist()]
            active, branch, ids = active[~ended], branch[~ended], ids[~ended]
            if len(active):
                prefix, branch = self._extend(prefix, branch, ids)

    def _finished(self, wave: Sequence[int], drawn: Drawn, request: int) -> Finished:
        sessions = np.flatnonzero(drawn.request == request).tolist()
        return Finished(wave[request], [drawn.completion(session, self._decode) for session in sessions])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # inference_mode is entered for each pass, not around the loop: across a `yield` it would leak to the caller.
    @torch.inference_mode()
    def _prefill(self, prompts: Jagged) -> Prefix:
        width = int(prompts.lengths.max())
        mask = torch.from_numpy(np.arange(width) >= width - prompts.lengths[:, None]).to(self._device)
        ids = torch.zeros(mask.shape, dtype=torch.int64, device=self._device)
        ids[mask] = torch.from_numpy(prompts.values).to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(ids, positions, mask.long(), None)

    @torch.inference_mode()
    def _extend(self, prefix: Prefix, branch: Array, ids: Array) -> tuple[Prefix, Array]:
        """Feed the ids that sessions on these branches have drawn; the new prefix, and each session's branch of it."""
        distinct, branch = np.unique(branch * prefix.logits.shape[1] + ids, return_inverse=True)
        parents, tokens = (torch.from_numpy(part).to(self._device) for part in divmod(distinct, prefix.logits.shape[1]))
        prefix.cache.batch_select_indices(parents)
        length = prefix.length[parents]
        mask = torch.cat([prefix.mask[parents], prefix.mask.new_ones(len(parents), 1)], dim=1)
        return self._forward(tokens[:, None], length[:, None], mask, prefix.cache), branch

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Prefix:
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if getattr(output, "past_key_values", None) is None:
            raise TypeError(f"{type(self._model).__name__} keeps no keys and values, which this engine generates from")
        return Prefix(output.past_key_values, mask, positions[:, -1] + 1, output.logits[:, -1])


@torch.inference_mode()
def sample(logits: Tensor, branch: Array, uniform: Array, temperature: float) -> tuple[Array, Array]:
    """A token id (S,) int64 for each session and its log-probability (S,) float32, by the inverse of the distribution.

    `logits` (B, V) are those of the branches, `branch` (S,) says which a session is on, `uniform` (S,) is its draw. At
    temperature 0 it is the likeliest token, the first of several, with its log-probability at 1.
    """
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)
    where = torch.from_numpy(branch).to(logits.device)
    total = cumulative[where, -1]
    if not bool(torch.isfinite(total).all()):
        raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinity")
    if temperature == 0:
        likeliest = log_probs[where].argmax(dim=-1)
        return likeliest.cpu().numpy(), log_probs[where, likeliest].cpu().numpy()
    draw = torch.from_numpy(uniform).to(logits.device, torch.float32) * total
    # Rounding may lift the draw to the total, and no token lies beyond it.
    draw = torch.minimum(draw, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative[where], draw[:, None], right=True).squeeze(1)
    return ids.cpu().numpy(), log_probs[where, ids].cpu().numpy()
