"""Joining a Ray cluster that somebody else has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import FAKE, Finished, environment, finish, gone, processes

REWARD = '''
import sys
from pathlib import Path
from typing import NamedTuple
from flowrl import Node, Prompt, Sample


class Where(Node):
    """Reports that its package was sent along: on this machine the import finds it where it was written."""

    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, response: Sample[str]) -> Out:
        sent = [Path(folder) / "mine" / "rewards.py" for folder in sys.path if "runtime_resources" in folder]
        return self.Out(Sample(response.rows, [float(any(map(Path.is_file, sent)))] * len(response)))
'''


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("cluster")
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--num-cpus=2", "--port=0",
               "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]  # fmt: skip
    subprocess.run(command, cwd=folder, env=environment(folder), check=True, capture_output=True, timeout=120)
    yield
    for pid in processes(folder):
        os.kill(pid, signal.SIGKILL)
    assert gone(folder)


def test_a_run_joins_a_cluster_and_brings_its_own_package(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "rewards.py").write_text(REWARD)
    (tmp_path / "fake.yaml").write_text(FAKE)
    own = ("--set", "nodes.reward={use: mine.rewards:Where, on_error: fail}")
    run = finish(tmp_path, "run", "fake.yaml", "--address", "auto", *own)
    assert run.code == 0, run.out + run.err
    assert run.metrics[0]["reward/mean"] == 1.0
    dry = finish(tmp_path, "run", "fake.yaml", "--address", "auto", "--dry-run", *own)
    assert dry.code == 0, dry.out + dry.err
    assert "the cluster at auto: 1 of 2 CPU asked for: it fits" in dry.out
    for more in ((), ("--dry-run",)):
        wide = ("--set", "pools.generate.workers=5")
        refused = finish(tmp_path, "run", "fake.yaml", "--address", "auto", *wide, *more)
        assert refused.code == 2
        assert "the pools ask for 5 CPU; present: 2 CPU" in refused.err


def test_an_address_where_nobody_listens_is_an_error_at_once(tmp_path: Path, flowrl: Callable[..., Finished]) -> None:
    (tmp_path / "fake.yaml").write_text(FAKE)
    run = flowrl("run", "fake.yaml", "--address", "127.0.0.1:1", timeout=30)
    assert run.code == 1
    assert "no Ray cluster answers at '127.0.0.1:1'" in run.err
