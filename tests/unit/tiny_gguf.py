"""A GGUF file of a random Llama with two layers, written as llama.cpp's converter writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONTROL, NORMAL = 3, 1
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_llama(**changes: Any) -> Any:
    """The model whose weights the file holds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **shape, num_key_value_heads=2, vocab_size=262, max_position_embeddings=64, tie_word_embeddings=True, **changes
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8.0)
    return model


def write_gguf(path: Path, model: Any, *, pre: str = "smollm", more: dict[str, int] | None = None) -> Path:
    """Write the model with a byte-level vocabulary whose `pre` says how it splits text; `more` are further values."""
    import numpy as np
    from gguf import GGUFWriter
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_name("tiny")
    space = bytes_to_unicode()[ord(" ")]
    tokens = [*SPECIAL, *bytes_to_unicode().values(), space * 2, "he", "hel"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([f"{space} {space}", "h e", "he l"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (more or {}).items():
        writer.add_uint32(key, value)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_named(name), _ordered(name, weight.numpy().astype(np.float32), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _named(name: str) -> str:
    short = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for long, other in short.items():
        name = name.replace(long, other)
    return name


def _ordered(name: str, weight: Any, config: Any) -> Any:
    """llama.cpp keeps the halves of each rotated pair side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    many = next((num for key, num in heads.items() if key in name), None)
    if many is None:
        return weight
    return weight.reshape(many, 2, weight.shape[0] // many // 2, -1).swapaxes(1, 2).reshape(weight.shape)
