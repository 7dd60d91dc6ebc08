"""Seconds that the advantages of 100,000 trajectories take: flowrl's nodes against verl's functions, on the same data.

    python benchmarks/advantage_scale.py [--trajectories 100000] [--group 8] [--max-tokens 32] [--repeats 5]
        [--threads 1] [--peer-packages FOLDER]

Groups of `--group`, rows in any order, responses of 1 to `--max-tokens` tokens of which one in ten is a tool's. verl
takes the rectangle that it works on, flowrl the jagged columns that it works on; neither is timed for making them. Each
is the fastest of `--repeats`, and both must give the same advantages. verl runs in a process of its own, on this
Python's torch, with its packages in a folder of their own that is filled when it is missing.

Those that verl computes in a loop over the rows must be at least 20 times as fast here; its loops over positions
(`reinforce_plus_plus`, `gae`) are shown beside. Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BENCH = Path(__file__).resolve().parents[1] / ".bench"
BUDGET_RATIO, TOLERANCE = 20.0, 2e-4
PEER = ("verl==0.9.1", "tensordict", "omegaconf", "hydra-core", "codetiming", "antlr4-python3-runtime==4.9.3")
OVER_ROWS = ("grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline")
OVER_POSITIONS = ("reinforce_plus_plus", "gae")
SETTINGS = {"reinforce_plus_plus": {"gamma": 0.99}, "gae": {"gamma": 0.99, "lam": 0.95}}


def make_data(num: int, group: int, max_tokens: int) -> dict[str, Any]:
    """Flat columns: the group and reward of each row, the mask and value of each token. Every row has one to train."""
    rng = np.random.default_rng(0)
    uid = rng.permutation(np.arange(num) // group)
    lengths = rng.integers(1, max_tokens + 1, num)
    mask = rng.random(lengths.sum()) < 0.9
    mask[np.cumsum(lengths) - lengths] = True
    return {"uid": uid, "reward": rng.random(num, np.float32), "lengths": lengths, "mask": mask,
            "values": rng.random(len(mask), np.float32)}  # fmt: skip


def fastest(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Seconds of the fastest call, and what it gave."""
    seconds, result = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def ours(data: dict[str, Any], repeats: int) -> dict[str, tuple[float, Any]]:
    """flowrl's nodes: seconds, and the advantages of all tokens."""
    from flowrl.batch import Sample, Token
    from flowrl.registry import find
    from flowrl.rows import Rows, offsets_of

    names, group = np.unique(data["uid"], return_inverse=True)
    order = np.argsort(group, kind="stable")
    session = np.empty(len(group), np.int64)
    session[order] = np.arange(len(group)) - np.searchsorted(group[order], group[order])
    rows, offsets = Rows([f"u{name}" for name in names], group, session), offsets_of(data["lengths"])
    columns = {"reward": Sample(rows, data["reward"]), "response_mask": Token(rows, data["mask"], offsets)}
    found = {}
    for name in (*OVER_ROWS, *OVER_POSITIONS):
        node: Any = find(f"advantage.{name}", Path()).load()(**SETTINGS.get(name, {}))
        given = columns | ({"values": Token(rows, data["values"], offsets)} if name == "gae" else {})
        seconds, out = fastest(lambda node=node, given=given: node.run(**given), repeats)
        found[name] = (seconds, out.advantages.values)
    return found


def peer(data: dict[str, Any], repeats: int) -> dict[str, tuple[float, Any]]:
    """The same of verl, in a process that has it."""
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    inside = np.arange(data["lengths"].max()) < data["lengths"][:, None]

    def rectangle(values: Any) -> Any:
        full = np.zeros(inside.shape, np.float32)
        full[inside] = values
        return torch.from_numpy(full)

    mask = rectangle(data["mask"])
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), last] = torch.from_numpy(data["reward"])
    index = np.array([f"u{name}" for name in data["uid"]], dtype=object)
    values, config = rectangle(data["values"]), AlgoConfig(norm_adv_by_std_in_grpo=True, gamma=0.99, lam=0.95)
    functions = {
        **{n: getattr(core_algos, f"compute_{n}_outcome_advantage") for n in (*OVER_ROWS, "reinforce_plus_plus")},
        "gae": core_algos.compute_gae_advantage_return,
    }
    found = {}
    for name, function in functions.items():
        given = {"token_level_rewards": rewards, "response_mask": mask}
        if name == "gae":
            given |= {"values": values, "gamma": 0.99, "lam": 0.95}
        elif name == "reinforce_plus_plus":
            given |= {"config": config}
        else:
            given |= {"index": index} | ({"config": config} if name == "grpo_passk" else {})
        seconds, (advantages, _) = fastest(lambda function=function, given=given: function(**given), repeats)
        found[name] = (seconds, (advantages * mask).numpy()[inside])
    return found


def measured_peer(data: dict[str, Any], args: argparse.Namespace) -> dict[str, tuple[float, Any]]:
    """What the peer's process has written down."""
    packages: Path = args.peer_packages
    if not packages.exists():
        print(f"filling {packages}", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *PEER,
                        "pyvers", "orjson"], check=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "given.npz", **data)
        command = [sys.executable, __file__, "--peer", folder, "--repeats", str(args.repeats)]
        environment = os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": str(args.threads)}
        subprocess.run(command, check=True, env=environment)
        with np.load(Path(folder) / "found.npz") as found:
            return {name: (float(found[f"{name}_seconds"]), found[name]) for name in (*OVER_ROWS, *OVER_POSITIONS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--peer-packages", type=Path, default=BENCH / "verl", help="folder with verl; filled if missing"
    )
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        with np.load(args.peer / "given.npz") as given:
            found = peer(dict(given), args.repeats)
        pairs = {name: advantages for name, (_, advantages) in found.items()}
        np.savez(args.peer / "found.npz", **pairs, **{f"{name}_seconds": each for name, (each, _) in found.items()})
        return 0
    data = make_data(args.trajectories, args.group, args.max_tokens)
    theirs, mine = measured_peer(data, args), ours(data, args.repeats)
    print(f"{args.trajectories:,} trajectories, {len(data['mask']):,} tokens, the fastest of {args.repeats}")
    print(f"{'advantage':30}{'flowrl':>10}{'verl':>10}{'ratio':>8}{'differ by':>12}")
    missed = []
    for name, (seconds, advantages) in mine.items():
        ratio, apart = theirs[name][0] / seconds, float(np.abs(advantages - theirs[name][1]).max())
        print(f"{name:30}{seconds:>8.3f} s{theirs[name][0]:>8.3f} s{ratio:>8.1f}{apart:>12.1e}")
        missed += [name] if apart > TOLERANCE or (name in OVER_ROWS and ratio < BUDGET_RATIO) else []
    print(
        f"at least {BUDGET_RATIO:g}x where verl loops over rows: {', '.join(missed) + ' missed' if missed else 'kept'}"
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
