"""Out of memory: the message names node, rows, tokens and setting; for real, in a process that may hold little more."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.node import Context
from flowrl.nodes._backend.memory import OutOfMemory, memory_watched
from flowrl.rows import Rows

SCRIPT = """
import resource, sys
sys.path.insert(0, {tests!r})
from trajectories import trajectories
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.memory import OutOfMemory
from flowrl.nodes.model.logprob import Logprob
from flowrl.nodes.update.policy import Policy

context = Context(node="{node}", model="policy", models={{"policy": ModelSpec(path="arith-tiny", trainable=True)}})
node = {make}
node.setup(context)
few, many = trajectories(2, 2), trajectories(8, 8, longest=300)
columns = lambda batch: {{name: batch.columns[name] for name in node.input_ports if name in batch.columns}}
node.run(**columns(few))
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 30 * 2**20, -1))
try:
    node.run(**columns(many))
except OutOfMemory as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits the address space as Linux does")
@pytest.mark.parametrize(
    ("node", "make"),
    [
        ("old_logprob", "Logprob(max_tokens_per_microbatch=100_000)"),
        ("actor_update", "Policy(minibatch=8, max_tokens_per_microbatch=100_000)"),
    ],
)
def test_out_of_memory_says_where_and_what_to_lower(node: str, make: str) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parent), node=node, make=make)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    said = re.fullmatch(
        rf"node '{node}' ran out of memory in a micro-batch of ([\d,]+) tokens, (\d+) rows: "
        rf"(u\d+_\d_0, ){{3}}u\d+_\d_0 and (\d+) more\. "
        rf"Lower nodes\.{node}\.max_tokens_per_microbatch, now 100000, below (\d+)\n",
        done.stdout,
    )
    assert said, done.stdout + done.stderr[-2000:]
    assert int(said[1].replace(",", "")) == int(said[5]) <= 100_000
    assert int(said[2]) == int(said[4]) + 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2**60),
        lambda: (_ for _ in ()).throw(MemoryError()),
        lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    ],
)
def test_what_counts_as_out_of_memory(make: Callable[[], object]) -> None:
    with pytest.raises(OutOfMemory, match=r"2,000 tokens, 1 row: b_0_0\. It is one row, which nodes\.update\.max_tok"):
        watched(make)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        watched(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="size") as raised:
        watched(lambda: torch.ones(2) @ torch.ones(3))
    assert not isinstance(raised.value, OutOfMemory)


def watched(work: Callable[[], object]) -> None:
    """Work on the second of two rows."""
    with memory_watched(Context(node="update"), Rows.of("ab"), 100) as begin:
        begin(np.array([1]), 2000)
        work()
