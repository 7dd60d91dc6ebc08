"""Trained tokens per second of one policy update: flowrl against TRL's GRPOTrainer on the same rows, in turn.

    python benchmarks/train_step.py [--prompts 4] [--group 4] [--layers 6] [--mean 128] [--micro-rows 4] [--threads 2]
           [--repeats 2] [--peer-env FOLDER]

The model has the shape of SmolLM2-135M (width 576, 49,152 words, tied embeddings) with random weights, and `--layers`
of its 30 layers on both sides. Response lengths are log-normal with sigma 1. Rollouts are left out on both sides; a
step is log-probabilities, entropies, loss, backward passes, clipping and AdamW, in float32, without a reference. Each
side runs in a process of its own on the same cores, a first step warms up, and the gradient norms must agree. The
second figure is the peak memory of log-probabilities, entropies and their backward pass alone, for the largest
micro-batch of each side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peak import peak_bytes
from step_vs_trl import BENCH, peer_python, run

HERE = Path(__file__).resolve()
SHAPE: dict[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
    "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""SmolLM2-135M's `config.json`."""


def made_rows(prompts: int, group: int, mean: int) -> dict[str, Any]:
    """Random rows: prompts of 30 to 60 tokens, log-normal responses, advantages of mean 0 in each group."""
    random = np.random.default_rng(0)
    asked = [random.integers(3, 49_152, random.integers(30, 61)).tolist() for _ in range(prompts)]
    lengths = np.maximum(random.lognormal(np.log(mean) - 0.5, 1.0, prompts * group).astype(int), 1)
    advantages = random.normal(size=(prompts, group))
    advantages -= advantages.mean(axis=1, keepdims=True)
    return {
        "group": group,
        "prompts": [asked[row // group] for row in range(prompts * group)],
        "responses": [random.integers(3, 49_152, length).tolist() for length in lengths],
        "advantages": advantages.astype(np.float32).flatten().tolist(),
    }


def make_model(folder: Path, layers: int) -> None:
    """A model of that shape with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers)).save_pretrained(folder)


def our_side(folder: str, file: str, threads: int, steps: int, memory: bool) -> dict[str, Any]:
    """One process of flowrl: update.policy as a worker runs it, without Ray."""
    from flowrl.batch import PromptToken, Step, Token
    from flowrl.metrics import collect
    from flowrl.model import ModelSpec, OptimizerSpec
    from flowrl.node import Context
    from flowrl.nodes.update.policy import Policy
    from flowrl.rows import Rows

    rows = json.loads(Path(file).read_text(encoding="utf-8"))
    group, num_prompts = rows["group"], len(rows["prompts"]) // rows["group"]
    spec = ModelSpec(path=folder, trainable=True, optimizer=OptimizerSpec(lr=1e-6))
    node = Policy(minibatch=num_prompts)
    node.setup(Context(node="update", model="policy", models={"policy": spec}, num_threads=threads))
    ids = Rows.of([f"u{row // group}" for row in range(len(rows["prompts"]))])
    responses = Token.of(ids, rows["responses"], "int")
    lengths = responses.jagged.lengths
    columns: dict[str, Any] = {
        "prompt_ids": PromptToken.of(ids, rows["prompts"][::group]),
        "response_ids": responses,
        "loss_mask": Token.of(ids, [[True] * length for length in lengths], "bool"),
        "advantages": Token.of(ids, [[a] * n for a, n in zip(rows["advantages"], lengths, strict=True)], "float"),
        "temperature": Step(ids, 1.0),
    }
    if memory:
        return {"bytes": memory_of_log_probs(node, columns)}
    seconds, cpu_seconds, norms = [], [], []
    for _ in range(steps):
        start = time.perf_counter(), time.process_time()
        with collect() as report:
            node.run(**columns)
        seconds.append(time.perf_counter() - start[0])
        cpu_seconds.append(time.process_time() - start[1])
        norms.append(report.metrics["actor/grad_norm"].value)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "grad_norms": norms}


def memory_of_log_probs(node: Any, columns: dict[str, Any]) -> int:
    """Bytes of log-probabilities, entropies and their backward pass, for the micro-batch with most of them."""
    import torch

    from flowrl.nodes._backend.chunked import Scoring, head_log_probs
    from flowrl.nodes._backend.logprob import shared_prompts
    from flowrl.partition import plan_micro_batches

    prompts, responses = columns["prompt_ids"].jagged, columns["response_ids"].jagged
    model = node._trainer.module
    costs, shared = prompts.lengths + responses.lengths, shared_prompts(model, prompts)
    plan = plan_micro_batches(costs, 1, 0, node.max_tokens_per_microbatch, prompts=shared)
    num_tokens = max(int(responses.lengths[micro.rows].sum()) for micro in plan)
    head = model.get_output_embeddings()
    hidden = torch.randn(num_tokens, SHAPE["hidden_size"], requires_grad=True)
    targets = torch.zeros(num_tokens, dtype=torch.int64)

    def work() -> None:
        head_log_probs(head, hidden, targets, Scoring(1.0, "value"), SHAPE["vocab_size"])[0].sum().backward()

    return peak_bytes(work)


def measured(command: list[str], threads: int) -> dict[str, Any]:
    """The line of JSON that a side prints last."""
    found: dict[str, Any] = json.loads(run(command, BENCH, threads).strip().splitlines()[-1])
    return found


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Run both sides in turn and print every pair, and the ratios."""
    rows = made_rows(options.prompts, options.group, options.mean)
    file, model = folder / "rows.json", folder / "model"
    file.write_text(json.dumps(rows), encoding="utf-8")
    make_model(model, options.layers)
    lengths = [len(row) for row in rows["responses"]]
    print(f"{len(lengths)} rows, {sum(lengths)} trained tokens, longest {max(lengths)}; {options.layers} of 30 layers, "
          f"{options.threads} threads, load average {os.getloadavg()[0]:.2f}", flush=True)  # fmt: skip
    common = [str(model), str(file), f"--threads={options.threads}"]
    sides = {
        "flowrl": [sys.executable, str(HERE), "--side", *common],
        "trl": [str(peer_python(options.peer_env.absolute())), str(HERE.with_name("trl_train_step.py")), *common,
                f"--micro-rows={options.micro_rows}"],
    }  # fmt: skip
    ratios = []
    for repeat in range(1, options.repeats + 1):
        found = {name: measured(command, options.threads) for name, command in sides.items()}
        norms = [each["grad_norms"][0] for each in found.values()]
        assert np.allclose(norms, norms[0], rtol=1e-3), f"the sides do not compute the same: gradient norms {norms}"
        ratios.append(median(found["trl"]["seconds"][1:]) / median(found["flowrl"]["seconds"][1:]))
        shown = [described(name, each, sum(lengths)) for name, each in found.items()]
        print(f"repeat {repeat}: {'  '.join(shown)}  ratio {ratios[-1]:.2f}  gradient norms {norms}", flush=True)
    memory = {name: measured([*command, "--memory"], options.threads)["bytes"] for name, command in sides.items()}
    shown = [f"{name} {size / 2**20:.0f} MiB" for name, size in memory.items()]
    print(f"median ratio {median(ratios):.2f} of TRL's trained tokens/s")
    print(f"peak memory of log-probabilities: {'  '.join(shown)}  ratio {memory['flowrl'] / memory['trl']:.2f}")


def described(name: str, found: dict[str, Any], num_tokens: int) -> str:
    """One side's run: on a busy machine the seconds of CPU say more than those of the clock."""
    seconds, cpu = median(found["seconds"][1:]), median(found["cpu_seconds"][1:])
    return f"{name} {num_tokens / seconds:.0f} trained tokens/s ({seconds:.2f} s, {cpu:.2f} s of CPU)"


def main() -> None:
    """Compare, or be one side of it."""
    if sys.argv[1:2] == ["--side"]:
        side = argparse.ArgumentParser()
        side.add_argument("model")
        side.add_argument("rows")
        side.add_argument("--threads", type=int)
        side.add_argument("--steps", type=int, default=2)
        side.add_argument("--memory", action="store_true")
        given = side.parse_args(sys.argv[2:])
        print(json.dumps(our_side(given.model, given.rows, given.threads, given.steps, given.memory)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--layers", type=int, default=6, help="of both sides' models; SmolLM2-135M has 30")
    parser.add_argument("--mean", type=int, default=128, help="of the response lengths")
    parser.add_argument("--micro-rows", type=int, default=4, help="rows that TRL computes at a time")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--peer-env", type=Path, default=BENCH / "trl-env", help="environment with trl; made if missing"
    )
    options = parser.parse_args()
    BENCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH) as folder:
        compare(options, Path(folder))


if __name__ == "__main__":
    main()
