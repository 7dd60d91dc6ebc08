"""TRL's side of `train_step.py`: one update of GRPOTrainer on given rows, in an environment that has `trl`.

    python trl_train_step.py MODEL_FOLDER ROWS.json --micro-rows 4 --threads 2 [--steps 2] [--memory]

Rollout and reward are left out: the trainer is handed the rows as its own `_generate_and_score_completions` would hand
them on, padded to the longest of the whole batch. Prints one line of JSON.
"""

import argparse
import json
import time

import torch
from datasets import Dataset
from peak import peak_bytes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad


class Given(GRPOTrainer):
    """A trainer whose rollout is given."""

    rows: dict

    def _generate_and_score_completions(self, inputs):
        def padded(rows, side):
            ids = [torch.tensor(row) for row in rows]
            return (
                pad(ids, padding_value=0, padding_side=side),
                pad([torch.ones_like(row) for row in ids], padding_value=0, padding_side=side),
            )

        prompt_ids, prompt_mask = padded(self.rows["prompts"], "left")
        completion_ids, completion_mask = padded(self.rows["responses"], "right")
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor(self.rows["advantages"]),
            "num_items_in_batch": completion_mask.sum(),
        }


class Clock(TrainerCallback):
    """Seconds and gradient norm of each optimizer step."""

    def __init__(self):
        self.seconds, self.cpu_seconds, self.norms = [], [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start[0])
        self.cpu_seconds.append(time.process_time() - self.start[1])

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


def memory_of_log_probs(trainer, rows, micro_rows):
    """Bytes of log-probabilities, entropies and their backward pass, for the micro-batch that the trainer makes."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    width = max(map(len, rows["prompts"])) + max(map(len, rows["responses"])) - 1
    weight = trainer.model.get_output_embeddings().weight
    hidden = torch.randn(micro_rows * width, weight.shape[1], requires_grad=True)
    targets = torch.zeros(len(hidden), dtype=torch.int64)

    def work():
        found = _ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
        )
        found[0].sum().backward()

    return peak_bytes(work)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--micro-rows", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with open(options.rows, encoding="utf-8") as file:
        rows = json.load(file)
    num_rows = len(rows["prompts"])
    config = GRPOConfig(
        output_dir="trl_out", use_cpu=True, per_device_train_batch_size=options.micro_rows,
        gradient_accumulation_steps=num_rows // options.micro_rows, num_generations=rows["group"],
        max_completion_length=max(map(len, rows["responses"])), max_steps=options.steps, learning_rate=1e-6,
        lr_scheduler_type="constant", beta=0.0, temperature=1.0, top_k=0, logging_steps=1, report_to=[],
        save_strategy="no", bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    words = Tokenizer(WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    clock = Clock()
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * num_rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"),
        callbacks=[clock],
    )
    torch.set_num_threads(options.threads)  # accelerate has set a number of its own
    trainer.rows = rows
    if options.memory:
        print(json.dumps({"bytes": memory_of_log_probs(trainer, rows, options.micro_rows)}))
        return
    trainer.train()
    print(json.dumps({"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds, "grad_norms": clock.norms}))


if __name__ == "__main__":
    main()
