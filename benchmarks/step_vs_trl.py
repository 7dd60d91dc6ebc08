"""Seconds of one GRPO step: flowrl's default pipeline against TRL's GRPOTrainer, in turn on the same cores.

Usage: python benchmarks/step_vs_trl.py [--steps 60] [--prompts 32] [--group 8] [--max-tokens 8] [--threads 2]
           [--repeats 3] [--peer-env FOLDER] [--peer-script FILE]

The work is matched: the same model, prompts, samples, tokens and learning rate, no reference model, one update a step
(so old log-probabilities are the update's own on both sides), no tracker, no checkpoints. Each side runs in a process
of its own that is confined to `--threads` cores, Ray's processes included. A step's time is the mean after the fifth
step, as the peer's script measures it. The sides alternate and repeat, so that noise of the machine shows as spread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / ".bench"
MODEL = ROOT / "nodes" / "assets" / "arith-tiny"
NUM_WARMUP_STEPS = 5
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    steps: int
    prompts: int
    group: int
    max_tokens: int
    lr: float
    threads: int

    def overrides(self, folder: Path) -> list[str]:
        """flowrl's default pipeline reduced to what the peer does."""
        return [
            f"batch.prompts={self.prompts}",
            f"batch.group={self.group}",
            f"nodes.rollout.max_tokens={self.max_tokens}",
            f"models.policy.optimizer.lr={self.lr!r}",
            "models.reference=null",
            "nodes.ref_logprob=null",
            "nodes.old_logprob=null",
            "nodes.actor_update.kl_coef=0.0",
            f"nodes.actor_update.minibatch={self.prompts}",
            "tracking={type: none}",
            "checkpoint=null",
            f"run.steps={self.steps}",
            f"run.dir={folder}",
        ]

    def peer_arguments(self) -> list[str]:
        """The same work for the peer's script."""
        return [
            f"--steps={self.steps}",
            f"--prompts={self.prompts}",
            f"--group={self.group}",
            f"--max-tokens={self.max_tokens}",
            f"--lr={self.lr}",
            f"--threads={self.threads}",
        ]


@dataclass(frozen=True)
class Measured:
    """One run of one side."""

    seconds_per_step: float
    last_reward: float
    """Mean reward of the last ten steps: shows that both sides learn."""
    times: dict[str, float]
    """flowrl's medians of `time/…` in seconds; empty for the peer."""


def run(command: list[str], cwd: Path, threads: int) -> str:
    """Output of a command confined to the first `threads` cores, with that many computing threads."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def measure_flowrl(work: Work) -> Measured:
    """Run the default pipeline and read its `metrics.jsonl`."""
    with tempfile.TemporaryDirectory(dir=BENCH) as folder:
        sets = [part for override in work.overrides(Path(folder)) for part in ("--set", override)]
        pipeline = ROOT / "pipelines" / "grpo_sync.yaml"
        run([sys.executable, "-m", "flowrl", "run", str(pipeline), *sets], BENCH, work.threads)
        (file,) = Path(folder).glob("*/metrics.jsonl")
        steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    timed = steps[NUM_WARMUP_STEPS:]
    names = [name for name in timed[0] if name.startswith("time/")]
    times = {name: median(step[name] for step in timed) for name in names}
    return Measured(mean(step["time/step"] for step in timed), mean(step["reward/mean"] for step in steps[-10:]), times)


def measure_peer(work: Work, python: Path, script: Path) -> Measured:
    """Run the peer's script and read its last line."""
    output = run([str(python), str(script), str(MODEL), *work.peer_arguments()], BENCH, work.threads)
    found = re.search(r"seconds_per_step (\S+) .*reward_last (\S+)", output)
    if found is None:
        sys.exit(f"{script} printed no seconds_per_step:\n{output[-4000:]}")
    return Measured(float(found[1]), float(found[2]), {})


def peer_python(folder: Path) -> Path:
    """Python of the peer's environment, which is made when it is missing; torch is the version that flowrl runs on."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} (some minutes)", flush=True)
        pins = [f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in ("torch", "transformers")]
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *pins, "trl==1.16.0", "datasets"], check=True)
    return python


def parse() -> tuple[Work, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare a GRPO step of flowrl with TRL's.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3.0e-4)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peer-env", type=Path, default=BENCH / "trl-env", help="environment with trl; made if missing"
    )
    parser.add_argument("--peer-script", type=Path, default=ROOT.parent / "shared" / "bench" / "trl_grpo.py")
    options = parser.parse_args()
    if options.steps <= NUM_WARMUP_STEPS:
        parser.error(f"--steps must be above {NUM_WARMUP_STEPS}: the first {NUM_WARMUP_STEPS} are warm-up")
    if not options.peer_script.is_file():
        parser.error(f"there is no {options.peer_script}; name the peer's script with --peer-script")
    work = Work(options.steps, options.prompts, options.group, options.max_tokens, options.lr, options.threads)
    return work, options


def describe(ours: Measured, theirs: Measured) -> str:
    """One pair of runs in one line."""
    return (
        f"flowrl {ours.seconds_per_step:.4f} s/step (median {ours.times['time/step']:.4f}, engine "
        f"{1e3 * ours.times['time/engine']:.1f} ms, last reward {ours.last_reward:.3f})  "
        f"trl {theirs.seconds_per_step:.4f} s/step (last reward {theirs.last_reward:.3f})  "
        f"ratio {ours.seconds_per_step / theirs.seconds_per_step:.3f}"
    )


def main() -> None:
    """Measure both sides in turn and print every pair, the median ratio, and where flowrl's time goes."""
    work, options = parse()
    BENCH.mkdir(exist_ok=True)
    python = peer_python(options.peer_env.absolute())
    script = options.peer_script.resolve()
    print(f"{work}, load average {os.getloadavg()[0]:.2f}", flush=True)
    pairs: list[tuple[Measured, Measured]] = []
    for repeat in range(1, options.repeats + 1):
        ours, theirs = measure_flowrl(work), measure_peer(work, python, script)
        pairs.append((ours, theirs))
        print(f"repeat {repeat}: {describe(ours, theirs)}", flush=True)
    ratio = median(ours.seconds_per_step / theirs.seconds_per_step for ours, theirs in pairs)
    engine = median(ours.times["time/engine"] for ours, _ in pairs)
    print(f"median ratio {ratio:.3f}  median time/engine {1e3 * engine:.1f} ms")
    print("flowrl's step, medians in ms, one column a repeat (nodes may overlap):")
    for name in sorted(pairs[0][0].times, key=lambda name: -pairs[0][0].times[name]):
        print(f"  {name.removeprefix('time/'):<14}" + "".join(f"{1e3 * ours.times[name]:9.1f}" for ours, _ in pairs))


if __name__ == "__main__":
    main()
