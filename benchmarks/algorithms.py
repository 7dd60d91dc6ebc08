"""Does each method learn the default task? 100 steps, three seeds under sync, one under separate_async.

    python benchmarks/algorithms.py [--steps 100] [--seeds 3] [--pipeline dapo] [--pipeline rloo]

Prints the table of docs/algorithms.md: mean rewards of the first and of the last tenth of the steps, by seed; the
rewards of a method must rise by at least 0.2 in every run. Of dynamic sampling, the rewards of all groups tried count;
of distillation, the divergence from the teacher must fall by half.
"""

from __future__ import annotations

import argparse
from statistics import mean

from runs import metric_of
from tqdm import tqdm

METHODS = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "ppo", "grpo_kl_in_reward",
    "grpo_judge", "distill_on_policy",
)  # fmt: skip
APART = ("schedule={mode: separate_async}", "pools.generate={shares: null, workers: 1}")
LEAST_RISE, LEAST_FALL = 0.2, 0.5
METRICS = {"distill_on_policy": "distill/reverse_kl", "dapo": "reward/tried"}
"""What says how well a method does where it is not the mean reward of what is trained."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pipeline", action="append", choices=METHODS, help="all if not given")
    options = parser.parse_args()
    runs = [("sync", seed) for seed in range(options.seeds)] + [("separate_async", 0)]
    missed, tenth = [], max(1, options.steps // 10)
    print("| pipeline | " + " | ".join(f"`{mode}`, seed {seed}" for mode, seed in runs) + " |", flush=True)
    print("|---" * (1 + len(runs)) + "|", flush=True)
    for pipeline in tqdm(options.pipeline or METHODS, unit="method"):
        cells, distils = [], pipeline == "distill_on_policy"
        for mode, seed in runs:
            name, settings = METRICS.get(pipeline, "reward/mean"), APART if mode != "sync" else ()
            values = metric_of(name, pipeline, seed, options.steps, settings)
            first, last = mean(values[:tenth]), mean(values[-tenth:])
            learned = last <= LEAST_FALL * first if distils else last - first >= LEAST_RISE
            missed += [] if learned else [f"{pipeline} under {mode}, seed {seed}: {first:.3f} to {last:.3f}"]
            cells.append(f"{first:.3f} → {last:.3f}")
        print(f"| `{pipeline}` | " + " | ".join(cells) + " |", flush=True)
    print("\n".join(missed) or "every run has learned")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
