"""What a command costs before it does anything, and what checking a large pipeline costs after that."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import flowrl

ROOT = Path(__file__).parents[2]
PIPELINE = "pipelines/grpo_sync.yaml"
NEVER = {"torch", "ray", "mlflow", "transformers", "vllm", "accelerate", "pyarrow", "pandas", "scipy", "sklearn"}
TEN_NODES = """
extends: grpo_sync
name: ten_nodes
nodes:
  reward: {writes: {reward: exact}}
  short:  {use: reward.length_penalty, reads: {reward: exact}, writes: {shaped_reward: short}}
  long:   {use: reward.length_penalty, scale: 0.01, reads: {reward: exact}, writes: {shaped_reward: long}}
  total:  {use: reward.weighted_sum, reads: {rewards: [exact, short, long]}}
"""


def imported(*arguments: str) -> set[str]:
    """The packages that a command imports, as `python -X importtime` tells."""
    run = [sys.executable, "-X", "importtime", "-m", "flowrl", *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 2), done.stderr
    return {line.split(".")[0] for line in re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)}


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("--help", {"networkx", "numpy"}),
        ("check --help", {"networkx", "numpy"}),
        ("schema", {"networkx"}),
        ("nodes", {"networkx"}),
        ("nodes reward.exact_match", {"networkx"}),
        (f"check {PIPELINE}", {"rich"}),
        ("check tests/golden/bad/five_at_once.yaml", set()),
        ("check tests/golden/bad/FR002_empty.yaml", {"networkx"}),
        (f"plan {PIPELINE}", set()),
        (f"plan {PIPELINE} --format json", set()),
        (f"plan {PIPELINE} --compare --steps 2", set()),
        (f"diff {PIPELINE} {PIPELINE}", set()),
        *((f"show {PIPELINE} --as {view}", set()) for view in ("tree", "mermaid", "dot", "html", "json", "resolved")),
    ],
)
def test_a_command_imports_only_what_it_needs(command: str, more: set[str]) -> None:
    found = imported(*command.split())
    assert "flowrl" in found
    assert found & (NEVER | more) == set()


def test_help_and_the_check_of_ten_nodes_answer_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ten.yaml"
    path.write_text(TEN_NODES)
    for arguments in (["--help"], ["check", str(path)]):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            run = [sys.executable, "-m", "flowrl", *arguments]
            done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
            seconds.append(time.perf_counter() - start)
            assert done.returncode == 0, done.stderr
        assert "check" not in arguments or "fine, 10 nodes" in done.stdout
        with capsys.disabled():
            print(f"\nflowrl {arguments[0]}: {min(seconds):.2f} s, best of 3 (budget 1 s on an idle machine)")
        assert min(seconds) < 2


def check_scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_scale", ROOT / "benchmarks" / "check_scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_thousand_nodes_are_checked_in_a_second() -> None:
    benchmark = check_scale()
    found = benchmark.measure(list(benchmark.SHAPES), [1000], repeats=1)
    assert benchmark.missed(found) == []


@pytest.mark.parametrize("name", flowrl.__all__)
def test_no_module_hides_a_public_name(name: str) -> None:
    assert importlib.util.find_spec(f"flowrl.{name}") is None, f"after its import flowrl.{name} would be the module"
