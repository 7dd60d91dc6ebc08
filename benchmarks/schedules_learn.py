"""Does the default pipeline learn as well under the asynchronous schedules as under sync, over equal samples?

    python benchmarks/schedules_learn.py [--steps 100] [--seeds 3] [--engine transformers] [--engine vllm]

Every run trains the same number of samples. Two figures of each: the mean reward of the last fifth of its steps, and
that of all steps, which says how early it learns. Averaged over the seeds, neither may be more than TOLERANCE lower
than that of sync.
"""

from __future__ import annotations

import argparse
from statistics import mean

from runs import metric_of
from tqdm import tqdm

PIPELINES = ("grpo_sync", "grpo_colocate_async", "grpo_separate_async")
TOLERANCE = 0.05
"""Of reward, which lies between 0 and 1."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engine", action="append", choices=["transformers", "vllm"], help="both if not given")
    options = parser.parse_args()
    engines, seeds = options.engine or ["transformers", "vllm"], range(options.seeds)
    runs = [(engine, pipeline, seed) for engine in engines for pipeline in PIPELINES for seed in seeds]
    found = {
        (engine, pipeline, seed): metric_of(
            "reward/mean", pipeline, seed, options.steps, [f"nodes.rollout.engine={engine}"]
        )
        for engine, pipeline, seed in tqdm(runs, unit="run")
    }
    worse, last = [], -max(1, options.steps // 5)
    print(f"{'engine':13} {'pipeline':20} {'last fifth, by seed':28} {'mean':>6} {'of all steps':>13}")
    for engine in engines:
        figures = {}
        for pipeline in PIPELINES:
            ends = [mean(found[engine, pipeline, seed][last:]) for seed in seeds]
            all_steps = mean(mean(found[engine, pipeline, seed]) for seed in seeds)
            figures[pipeline] = mean(ends), all_steps
            by_seed = " ".join(f"{end:.3f}" for end in ends)
            print(f"{engine:13} {pipeline:20} {by_seed:28} {mean(ends):6.3f} {all_steps:13.3f}")
        for pipeline, values in figures.items():
            for value, least in zip(values, figures["grpo_sync"], strict=True):
                if value < least - TOLERANCE:
                    worse.append(f"{engine} {pipeline}: {value:.3f}, sync has {least:.3f}")
    print("\n".join(worse) or f"all within {TOLERANCE} of sync")
    return int(bool(worse))


if __name__ == "__main__":
    raise SystemExit(main())
