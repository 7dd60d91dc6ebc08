"""Throughput of `rollout.generate` with vLLM against bare vLLM (`LLM.generate`) on the same prompts, seeds and tokens.

    python benchmarks/rollout_overhead.py [--model smollm2] [--prompts 16] [--group 4] [--max-tokens 64] [--repeats 3]

Both engines are alive all the time and take turns. The flowrl side is what a worker does: chat template, requests, the
stream of finished groups, and the columns that are made of them. Needs a fetched model (`flowrl fetch smollm2`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np

from flowrl.batch import Prompt
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.engine import engines_of, seed_of
from flowrl.nodes.rollout.generate import Generate
from flowrl.rows import Rows

REST_SECONDS = 2.0
"""Processes of the other engine poll for a second after their last work, and take a core for it."""


def main() -> None:
    """Print tokens per second of both, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="shipped or fetched model, or a folder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    context = Context(model="policy", models={"policy": ModelSpec(path=options.model)}, num_threads=threads)
    node = Generate(engine="vllm", max_tokens=options.max_tokens)
    node.setup(context)
    bare = bare_vllm(context)
    texts = [f"Tell me a short story about the number {number}." for number in range(options.prompts)]
    (engine,) = engines_of(context).values()
    prompts = engine.encode(texts)
    ratios = []
    try:
        for repeat in range(options.repeats + 1):
            mine, num_mine = timed(lambda: rollout(node, texts, options.group))
            theirs, num_theirs = timed(lambda: generate(bare, prompts, options.group, options.max_tokens))
            assert num_mine == num_theirs, "the same seeds give the same tokens"
            if repeat == 0:
                continue  # warms up
            ratios.append(theirs / mine)
            print(f"flowrl {num_mine / mine:7.1f} tok/s   bare vLLM {num_theirs / theirs:7.1f} tok/s   "
                  f"ratio {ratios[-1]:.3f}", flush=True)  # fmt: skip
    finally:
        node.close()
    print(f"median ratio {statistics.median(ratios):.3f} over {options.repeats} pairs "
          f"({options.prompts} prompts x {options.group}, {options.max_tokens} tokens, {options.model})")  # fmt: skip


def bare_vllm(context: Context) -> Any:
    """vLLM's own offline engine with the same arguments and environment."""
    from vllm import LLM

    from flowrl.nodes._backend.vllm_start import default_arguments, process_environment

    arguments = default_arguments(context, None, 1)
    os.environ.update(process_environment(context, arguments))
    return LLM(**arguments)


def rollout(node: Generate, texts: list[str], group: int) -> int:
    """Tokens that the node has made."""
    rows = Rows([f"u{i}" for i in range(len(texts))], planned=[group] * len(texts), settled=[0] * len(texts))
    return sum(len(out.response_ids) for out in node.run(Prompt(rows, np.array(texts, dtype=object))))


def generate(bare: Any, prompts: list[list[int]], group: int, max_tokens: int) -> int:
    """Tokens that bare vLLM has made, with the log-probabilities that a trainer needs."""
    from vllm import SamplingParams

    params = [
        SamplingParams(n=group, max_tokens=max_tokens, temperature=1.0, logprobs=0, seed=seed_of(0, f"u{i}", 0))
        for i in range(len(prompts))
    ]
    outputs = bare.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return sum(len(each.token_ids) for output in outputs for each in output.outputs)


def timed(work: Any) -> tuple[float, int]:
    """Seconds, and what the work returned."""
    time.sleep(REST_SECONDS)
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


if __name__ == "__main__":
    main()
