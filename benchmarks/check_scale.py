"""Seconds that `flowrl check` and the plan take after start-up, for pipelines of 100, 1,000 and 4,000 nodes.

    python benchmarks/check_scale.py [--shape chain]... [--sizes 100 1000 4000] [--repeats 5] [--json] [--profile]

Each pipeline is the default one with library nodes added until it has so many, written to a YAML file. Timed is all
that one `flowrl check FILE` does once its modules are imported: read the file, bind, build the graph, check, plan. The
shapes:

- `chain`: each node shapes the reward of the one before;
- `diamonds`: two nodes read the same reward, a third adds them up, and so on;
- `fan`: all nodes read one reward, one node adds all of them up;
- `mix`: chains, sums, second rewards, log-probabilities and nodes of a user's own file side by side;
- `wasted`: nobody reads what the added nodes write, so each is a warning;
- `misspelt`: like `mix`, and every tenth node reads a field whose name is nearly right, so each is an error;
- `junk`: like `mix`, and every second node has an unknown key and a value of the wrong type;
- `ring`: like `chain`, and the first node reads what the last one writes.

Budget, for every shape: 1,000 nodes in under a second, 4,000 nodes in at most five times that. Exit code 1 if one of
the two is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flowrl.pipeline import Pipeline, load
from flowrl.spec.dump import dump_yaml

BUDGET_SECONDS, BUDGET_RATIO = 1.0, 5.0
WRONG = ("misspelt", "junk", "ring")
"""Shapes that are refused."""
OWN = """\
from typing import NamedTuple

from flowrl import Node, Sample


class Scaled(Node):
    factor: float = 0.5

    class Out(NamedTuple):
        scaled: Sample[float]

    def run(self, value: Sample[float]) -> Out:
        return self.Out(value * self.factor)
"""
HEAD = f"""\
extends: {Path(__file__).resolve().parents[1] / "pipelines" / "grpo_sync.yaml"}
name: scale
"""
NUM_DEFAULT = 7
"""Nodes of the default pipeline."""
Nodes = Iterator[tuple[str, dict[str, object]]]


def shaped(name: str, source: str) -> tuple[str, dict[str, object]]:
    """A node that shapes one reward into another, which bears the node's name."""
    return name, {
        "use": "reward.length_penalty",
        "budget": 8,
        "reads": {"reward": source},
        "writes": {"shaped_reward": name},
    }


def summed(name: str, sources: list[str]) -> tuple[str, dict[str, object]]:
    """A node that adds rewards up."""
    return name, {"use": "reward.weighted_sum", "reads": {"rewards": sources}, "writes": {"reward": name}}


def chain(num_nodes: int) -> Nodes:
    for index in range(num_nodes):
        yield shaped(f"n{index}", f"n{index - 1}" if index else "raw")


def diamonds(num_nodes: int) -> Nodes:
    last = "raw"
    for index in range(num_nodes):
        name = f"n{index}"
        if index % 3 < 2:
            yield shaped(name, last)
        else:
            yield summed(name, [f"n{index - 2}", f"n{index - 1}"])
            last = name


def fan(num_nodes: int) -> Nodes:
    for index in range(num_nodes - 1):
        yield shaped(f"n{index}", "raw")
    yield summed(f"n{num_nodes - 1}", [f"n{index}" for index in range(num_nodes - 1)])


def mix(num_nodes: int) -> Nodes:
    for index in range(num_nodes):
        name = f"n{index}"
        if index % 5 == 0:
            yield name, {"use": "reward.exact_match", "ignore_case": True, "writes": {"reward": name}}
        elif index % 5 == 4:
            yield summed(name, [f"n{index - 1}", f"n{index - 2}", f"n{max(index - 50, 0)}"])
        elif index % 50 == 1:
            yield (
                name,
                {
                    "use": "model.logprob",
                    "model": "reference",
                    "pool": "train",
                    "writes": {"log_probs": f"lp{index}"},
                },
            )
        elif index % 5 == 2:
            yield (
                name,
                {
                    "use": "./own.py:Scaled",
                    "reads": {"value": f"n{index // 5 * 5}"},
                    "writes": {"scaled": name},
                },
            )
        else:
            yield shaped(name, f"n{index // 5 * 5}")


def wasted(num_nodes: int) -> Nodes:
    for index in range(num_nodes):
        yield shaped(f"n{index}", "raw")


def misspelt(num_nodes: int) -> Nodes:
    for index, (name, node) in enumerate(mix(num_nodes)):
        if index % 10 == 2:
            yield shaped(name, f"n{index // 10}_{index}")
        else:
            yield name, node


def junk(num_nodes: int) -> Nodes:
    for index, (name, node) in enumerate(mix(num_nodes)):
        yield name, {**node, "polo": "cpu", "timeout": "soon"} if index % 2 else node


def ring(num_nodes: int) -> Nodes:
    for index in range(num_nodes):
        yield shaped(f"n{index}", f"n{(index or num_nodes) - 1}")


SHAPES: dict[str, Callable[[int], Nodes]] = {
    "chain": chain, "diamonds": diamonds, "fan": fan, "mix": mix, "wasted": wasted, "misspelt": misspelt,
    "junk": junk, "ring": ring,
}  # fmt: skip


def write(shape: str, num_nodes: int, folder: Path) -> Path:
    """The YAML file of a pipeline with that many nodes; the last one writes the reward that trains."""
    nodes = dict(SHAPES[shape](num_nodes - NUM_DEFAULT - 1))
    last = list(nodes)[-1] if shape != "wasted" else "raw"
    nodes["last"] = shaped("reward", last)[1]
    path = folder / f"{shape}_{num_nodes}.yaml"
    (folder / "own.py").write_text(OWN)
    path.write_text(HEAD + dump_yaml({"nodes": {"reward": {"writes": {"reward": "raw"}}, **nodes}}))
    return path


def judge(path: Path, num_nodes: int, shape: str) -> Pipeline:
    """What `flowrl check` does with a file; the pipelines must be what they are said to be."""
    pipeline = load(path)
    problems = pipeline.check()
    wrong = any(problem.severity == "error" for problem in problems)
    assert wrong == (shape in WRONG), problems[:3]
    assert wrong or len(pipeline.plan().graph.nodes) == num_nodes
    return pipeline


def seconds(path: Path, num_nodes: int, shape: str, repeats: int) -> float:
    """Median time of one check."""
    taken = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        judge(path, num_nodes, shape)
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def measure(shapes: list[str], sizes: list[int], repeats: int) -> dict[str, dict[int, float]]:
    """Seconds by shape and size."""
    with tempfile.TemporaryDirectory() as folder:
        judge(write("mix", 100, Path(folder)), 100, "mix")  # imports what a check needs
        return {
            shape: {size: seconds(write(shape, size, Path(folder)), size, shape, repeats) for size in sizes}
            for shape in shapes
        }


def missed(found: dict[str, dict[int, float]]) -> list[str]:
    """Budgets that were not kept."""
    said = []
    for shape, times in found.items():
        if times.get(1000, 0.0) >= BUDGET_SECONDS:
            said.append(f"{shape}: 1,000 nodes take {times[1000]:.2f} s; the budget is {BUDGET_SECONDS:g} s")
        if 1000 in times and 4000 in times and times[4000] > BUDGET_RATIO * times[1000]:
            said.append(f"{shape}: 4,000 nodes take {times[4000] / times[1000]:.1f} times as long as 1,000; the budget "
                        f"is {BUDGET_RATIO:g}")  # fmt: skip
    return said


def show(found: dict[str, dict[int, float]], sizes: list[int]) -> None:
    """The table."""
    print(f"{'seconds':<10}" + "".join(f"{size:>10,}" for size in sizes) + f"{'4,000/1,000':>14}")
    for shape, times in found.items():
        ratio = f"{times[4000] / times[1000]:14.2f}" if {1000, 4000} <= times.keys() else ""
        print(f"{shape:<10}" + "".join(f"{times[size]:10.3f}" for size in sizes) + ratio)


def profile(shape: str, size: int) -> None:
    """Where the time goes."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(shape, size, Path(folder))
        judge(path, size, shape)
        profiler = cProfile.Profile()
        profiler.runcall(judge, path, size, shape)
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this one; may be repeated")
    parser.add_argument("--sizes", nargs="+", type=int, default=[100, 1000, 4000], help="numbers of nodes")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many counts")
    parser.add_argument("--json", action="store_true", help="print the seconds as JSON")
    parser.add_argument("--profile", action="store_true", help="show where the time of the largest size goes")
    options = parser.parse_args()
    shapes = options.shape or list(SHAPES)
    if options.profile:
        for shape in shapes:
            profile(shape, max(options.sizes))
        return 0
    found = measure(shapes, options.sizes, options.repeats)
    if options.json:
        print(json.dumps({"seconds": found, "missed": missed(found)}, indent=2))
    else:
        show(found, options.sizes)
        print(*missed(found), sep="\n", end="\n" * bool(missed(found)))
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
