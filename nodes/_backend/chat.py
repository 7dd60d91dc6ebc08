"""Prompts of the data as token ids: text or chat messages, through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[Mapping[str, Any]]
"""A user's turn as text, or the messages of a chat, each with `role` and `content`."""


class ChatTemplateError(ValueError):
    """A chat template cannot be trusted with a prompt; the message says which part, and what to do."""

    def __init__(self, fact: str, fix: str = "") -> None:
        super().__init__(f"{fact}; {fix}" if fix else fact)
        self.fact, self.fix = fact, fix


@dataclass(frozen=True)
class ChatFormat:
    """How prompts become token ids."""

    use_template: bool = True
    """Present text as a user's turn where the tokenizer has a chat template."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], chat: ChatFormat = ChatFormat()
) -> list[list[int]]:
    """Token ids of each prompt. Raises `ValueError` for what is neither text nor messages.

    Messages always go through the template. It must keep what was said: one that drops or changes an earlier turn, such
    as its thinking, would let the model train on another conversation than the data holds (`ChatTemplateError`).
    """
    if chat.options and tokenizer.chat_template is None:
        fact = f"template_options ({', '.join(chat.options)}) have no effect: the tokenizer has no chat template"
        raise ChatTemplateError(fact, "give the model a `chat_template`, or leave template_options out")
    templated = chat.use_template and tokenizer.chat_template is not None
    texts: list[str] = []
    for prompt in prompts:
        if isinstance(prompt, str) and not templated:
            texts.append(prompt)
        else:
            texts.append(_rendered(tokenizer, _messages(prompt), chat.options))
    plain = [isinstance(prompt, str) and not templated for prompt in prompts]
    # The template has written the special tokens, so the tokenizer must not add them again.
    return [list(tokenizer(text, add_special_tokens=add)["input_ids"]) for text, add in zip(texts, plain, strict=True)]


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0
    if not is_chat or not all(isinstance(turn, Mapping) and "role" in turn and "content" in turn for turn in prompt):
        raise ValueError("the prompt is neither text nor a list of messages with `role` and `content`")
    return [dict(turn) for turn in prompt]


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    if tokenizer.chat_template is None:
        raise ChatTemplateError(
            "the prompt is a list of messages, but the tokenizer has no chat template",
            "give prompts as text, or the model a `chat_template`",
        )

    def render(turns: list[dict[str, Any]], generate: bool) -> str:
        return str(tokenizer.apply_chat_template(turns, add_generation_prompt=generate, tokenize=False, **options))

    whole = render(messages, True)
    for end in range(1, len(messages)):
        if messages[end - 1]["role"] == "assistant" and not whole.startswith(render(messages[:end], False)):
            raise ChatTemplateError(
                f"the chat template rewrites history: turn {end} ({_start(messages[end - 1]['content'])}) reads "
                "differently once later turns follow, so the model would be trained on another conversation than the "
                "data holds",
                "give a `chat_template` that keeps earlier turns as they are, or prompts without them",
            )
    return whole


def _start(content: Any) -> str:
    text = str(content)
    return repr(text if len(text) <= 40 else text[:37] + "...")
