"""Prompts as token ids: text, chat messages, templates that keep history and templates that rewrite it."""

import pytest
from transformers import PreTrainedTokenizerBase

from flowrl.model import ModelSpec
from flowrl.nodes._backend.chat import ChatFormat, ChatTemplateError, encode_prompts
from flowrl.nodes._backend.models import load_tokenizer

KEEPS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
REWRITES = (
    "{% for m in messages %}{{ m.content if m.role != 'assistant' or loop.last else m.content.split('=')[-1] }}"
    "{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": "1+2=3"},
    {"role": "user", "content": "2+2="},
]


def tokenizer(template: str | None) -> PreTrainedTokenizerBase:
    """The shipped tokenizer, which reads single characters, with another template."""
    found = load_tokenizer(ModelSpec(path="arith-tiny"))
    found.chat_template = template
    return found


def read(found: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(found.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def test_text_without_a_template_is_tokenised_as_it_is() -> None:
    plain = tokenizer(None)
    assert encode_prompts(plain, ["1+2="]) == [plain("1+2=")["input_ids"]]
    assert encode_prompts(tokenizer(KEEPS), ["1+2="], ChatFormat(use_template=False)) == [plain("1+2=")["input_ids"]]


def test_options_of_a_template_that_there_is_not_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match=r"template_options \(enable_thinking\) have no effect"):
        encode_prompts(tokenizer(None), ["1+2="], ChatFormat(options={"enable_thinking": False}))


def test_text_is_a_users_turn_where_there_is_a_template_and_messages_always_are() -> None:
    found = tokenizer(KEEPS)
    expected = [found("1+2=", add_special_tokens=False)["input_ids"]]
    assert encode_prompts(found, ["1+2"]) == expected
    assert encode_prompts(found, [[{"role": "user", "content": "1+2"}]]) == expected
    assert encode_prompts(found, [[{"role": "user", "content": "1+2"}]], ChatFormat(use_template=False)) == expected


def test_options_reach_the_template() -> None:
    found = tokenizer("{{ '1' if enable_thinking else '0' }}{{ messages[0].content }}")
    assert encode_prompts(found, ["+"], ChatFormat(options={"enable_thinking": True})) == [found("1+")["input_ids"]]
    assert encode_prompts(found, ["+"], ChatFormat(options={"enable_thinking": False})) == [found("0+")["input_ids"]]


def test_messages_without_a_template_say_what_is_missing() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        encode_prompts(tokenizer(None), [CHAT])


@pytest.mark.parametrize("prompt", [[], 3, None, {"role": "user"}, [{"role": "user"}], ["1+2="], [{"content": "1"}]])
def test_what_is_neither_text_nor_messages_is_refused(prompt: object) -> None:
    with pytest.raises(ValueError, match="neither text nor a list of messages"):
        encode_prompts(tokenizer(KEEPS), [prompt])


def test_a_template_that_keeps_history_takes_a_conversation() -> None:
    found = tokenizer(KEEPS)
    assert read(found, encode_prompts(found, [CHAT])[0]).replace(" ", "") == "1+2=1+2=32+2=="


def test_a_template_that_rewrites_history_is_refused_with_the_turn() -> None:
    with pytest.raises(ChatTemplateError, match=r"rewrites history: turn 2 \('1\+2=3'\)"):
        encode_prompts(tokenizer(REWRITES), [CHAT])
    # Of a conversation without earlier answers there is nothing to rewrite.
    encode_prompts(tokenizer(REWRITES), ["1+2=", CHAT[:1]])


def test_half_of_a_character_is_refused_and_not_guessed() -> None:
    with pytest.raises((ValueError, TypeError)):
        encode_prompts(tokenizer(None), ["1+\ud83d"])
