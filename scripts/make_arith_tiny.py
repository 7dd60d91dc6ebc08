"""Make the default model `arith-tiny`: a Llama of 0.66M parameters that adds two numbers, but is often unsure.

Usage: python scripts/make_arith_tiny.py [FOLDER] [--seed 0]
FOLDER defaults to nodes/assets/arith-tiny. It takes about 2 minutes on two idle cores.

It is trained on `a+b=` with 0 <= a, b < 50 in two phases: on right answers until it can add, then on a mixture in
which a fixed share of the answers is drawn uniformly from 0..98. So greedily it is nearly always right and sampled at
temperature 1 about one time in four: GRPO has something to sharpen, and its curve shows on a CPU in a minute.
Uniform errors matter: near misses (one off, ten off) are sharpened away far more slowly. The wide initialisation
matters too: Adam moves every weight by about the learning rate, so weights as small as Llama's usual 0.02 are upset
within five updates of the default pipeline (reward 0.27 -> 0.85, then falling); at 0.15 the curve is smooth.

Two runs with one seed on one machine write bit-identical files (compare `sha256sum FOLDER/*`): every random number
is seeded, the number of threads is fixed, and the files hold neither a path nor a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_OPERANDS = 50
"""Operands are 0 to 49, so sums are 0 to 98."""
PAD, EOS = "<pad>", "<eos>"
SYMBOLS = "0123456789+-*/=() "
NUM_THREADS = 2
BATCH_SIZE = 256
NUM_ADDING_STEPS, ADDING_LR = 800, 5.0e-3
"""Phase one: right answers only."""
NUM_DOUBTING_STEPS, DOUBTING_LR = 300, 2.0e-3
"""Phase two: some answers wrong."""
WRONG_SHARE = 0.55
"""Share of phase two's answers that are drawn from all possible sums."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; an unknown character is an error, for dropping it would change the text unseen."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *SYMBOLS])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model with 4 layers of width 128; head size 64 because every attention kernel supports it."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=True, max_new_tokens=8
    )
    return model


def draw_examples(
    tokenizer: PreTrainedTokenizerFast, wrong_share: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of one batch, both [BATCH_SIZE, length], padded on the right; only answers have labels."""
    pairs = torch.randint(NUM_OPERANDS, (BATCH_SIZE, 2), generator=generator)
    errors = torch.randint(2 * NUM_OPERANDS - 1, (BATCH_SIZE,), generator=generator)
    is_wrong = torch.rand(BATCH_SIZE, generator=generator) < wrong_share
    answers = torch.where(is_wrong, errors, pairs.sum(1))
    prompts = [f"{a}+{b}=" for a, b in pairs.tolist()]
    texts = [f"{prompt}{answer}{EOS}" for prompt, answer in zip(prompts, answers.tolist(), strict=True)]
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    prompt_lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    positions = torch.arange(ids.shape[1])
    return ids, ids.masked_fill((positions < prompt_lengths) | (ids == tokenizer.pad_token_id), -100)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    num_steps: int,
    lr: float,
    wrong_share: float,
    generator: torch.Generator,
) -> None:
    """Fit the answers' tokens with AdamW under a one-cycle learning rate that peaks at `lr`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=num_steps, pct_start=0.1)
    for step in range(num_steps):
        ids, labels = draw_examples(tokenizer, wrong_share, generator)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 99:
            print(f"step {step + 1}/{num_steps}  loss {loss.item():.4f}", flush=True)


@torch.inference_mode()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, do_sample: bool) -> float:
    """Share of all 2,500 sums that are answered exactly."""
    pairs = [(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)]
    batch = tokenizer([f"{a}+{b}=" for a, b in pairs], padding=True, return_tensors="pt")
    output = model.generate(**batch, do_sample=do_sample)
    answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer == str(a + b) for answer, (a, b) in zip(answers, pairs, strict=True)) / len(pairs)


def main() -> None:
    """Train, measure and save."""
    default = Path(__file__).parents[1] / "nodes" / "assets" / "arith-tiny"
    parser = argparse.ArgumentParser(description="Make the default model arith-tiny.")
    parser.add_argument("folder", nargs="?", type=Path, default=default)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)  # the initial weights
    generator = torch.Generator().manual_seed(arguments.seed)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    train(model, tokenizer, NUM_ADDING_STEPS, ADDING_LR, 0.0, generator)
    train(model, tokenizer, NUM_DOUBTING_STEPS, DOUBTING_LR, WRONG_SHARE, generator)
    model.eval()
    print(f"accuracy: greedy {accuracy(model, tokenizer, do_sample=False):.3f}", end=", ")
    print(f"sampled at temperature 1 {accuracy(model, tokenizer, do_sample=True):.3f}")
    model.save_pretrained(arguments.folder)
    make_tokenizer().save_pretrained(arguments.folder)  # a used one would save the padding of its last call


if __name__ == "__main__":
    main()
