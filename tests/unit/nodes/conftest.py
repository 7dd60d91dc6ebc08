"""Contexts and small models that the tests of library nodes share."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.model_files import ASSETS
from flowrl.node import Context


@pytest.fixture
def context() -> Context:
    """A worker with the shipped model, trainable and without clipping."""
    optimizer = OptimizerSpec(lr=1e-3, max_grad_norm=math.inf)
    return Context(models={"policy": ModelSpec(path="arith-tiny", trainable=True, optimizer=optimizer)}, model="policy")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random model of another architecture that reads the shipped tokenizer's ids."""

    def make(kind: str) -> Path:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        if kind == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=24, n_embd=32, n_layer=2, n_head=2))
        else:
            model = Qwen2ForCausalLM(
                Qwen2Config(
                    vocab_size=20,
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=24,
                    tie_word_embeddings=True,
                )
            )
        for parameter in model.parameters():
            if parameter.ndim > 1:  # a fresh model is nearly uniform, which would hide mistakes
                parameter.data.mul_(4.0)
        model.generation_config.eos_token_id = [1, 7]
        model.save_pretrained(folder)
        for file in (ASSETS / "arith-tiny").glob("tokenizer*"):
            shutil.copy(file, folder)
        return folder

    return make
