"""A tracker whose package is not installed is refused before anything starts, with the command that installs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowrl import track
from flowrl.cli import app
from flowrl.spec.tracking import MlflowTracking, NoTracking, TensorboardTracking, WandbTracking
from flowrl.track import missing_package

PIPELINE = """extends: grpo_sync
name: tracked
tracking:
  - {type: mlflow}
  - {type: tensorboard}
  - {type: wandb, mode: disabled}
"""


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "find_spec", lambda name: None if name in ("tensorboard", "wandb") else name)


def test_what_is_installed_is_not_missed() -> None:
    for spec in (MlflowTracking(), TensorboardTracking(), WandbTracking(), NoTracking()):
        assert missing_package(spec) == ""


@pytest.mark.usefixtures("_nothing_installed")
@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--local"]])
def test_a_missing_package_is_refused_where_it_is_asked_for(tmp_path: Path, more: list[str]) -> None:
    path = tmp_path / "tracked.yaml"
    path.write_text(PIPELINE)
    found = CliRunner().invoke(app, ["run", str(path), "--set", f"run.dir={tmp_path / 'runs'}", *more])
    assert found.exit_code == 2
    assert found.stderr.count("error[") == 1
    assert "error[FR007]" in found.stderr
    assert "tracked.yaml:5:12" in found.stderr
    assert "type 'tensorboard' needs the package tensorboard, which is not installed here" in found.stderr
    assert "fix: pip install 'flowrl[tensorboard]'" in found.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("_nothing_installed")
def test_a_single_tracker_is_shown_where_it_stands(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["run", "grpo_sync", "--set", "tracking={type: wandb}", "--dry-run"])
    assert found.exit_code == 2
    assert "pip install 'flowrl[wandb]'" in found.stderr
    assert "--set:1:17" in found.stderr
