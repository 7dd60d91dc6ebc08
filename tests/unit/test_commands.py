"""The verbs of the command line: what they print where, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flowrl.cli import app

ROOT = Path(__file__).parents[2]
DEFAULT = str(ROOT / "pipelines" / "grpo_sync.yaml")
NO_KL = ("--set", "nodes.actor_update.kl_coef=0")
APART = ("--set", "pools.generate={shares: null, workers: 1}", "--set", "schedule={mode: separate_async}")


def flowrl(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and error stream of a command."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_a_warning_fails_only_when_strict() -> None:
    code, out, err = flowrl("check", DEFAULT, *NO_KL)
    assert (code, "fine, 7 nodes in 5 levels" in out, "warning[FR030]" in err) == (0, True, True)
    code, out, err = flowrl("check", DEFAULT, *NO_KL, "--strict")
    assert (code, out) == (2, "")
    assert err.endswith("0 errors, 1 warning, which --strict counts as errors\n")
    assert flowrl("check", DEFAULT, "--strict")[0] == 0


def test_problems_as_json_hold_all_that_the_text_says() -> None:
    code, out, err = flowrl("check", DEFAULT, "--set", "nodes.reward.use=reward.exact_mach", "--format", "json")
    data = json.loads(out)
    assert (code, err, data["format"], data["fine"]) == (2, "", 1, False)
    (problem,) = data["problems"]
    assert problem["code"] == "FR009"
    assert (problem["file"], problem["line"], problem["path"]) == ("--set", 1, "nodes.reward.use")
    assert "did you mean 'reward.exact_match'?" in problem["fact"]
    assert json.loads(flowrl("check", DEFAULT, "--format", "json")[1]) == {"format": 1, "fine": True, "problems": []}


def test_a_module_that_prints_does_not_spoil_an_answer(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('hello')\n" + (ROOT / "examples/custom_node/my_nodes.py").read_text())
    node = "{use: ./loud.py:LengthPenalty, budget: 8, writes: {shaped_reward: shaped}}"
    (tmp_path / "loud.yaml").write_text(f"extends: grpo_sync\nname: loud\nnodes: {{shape: {node}}}\n")
    run = [sys.executable, "-m", "flowrl", "check", str(tmp_path / "loud.yaml"), "--format", "json"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert json.loads(done.stdout)["fine"]
    assert done.stderr == "hello\n"


def test_problems_for_github_are_workflow_commands_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a,b.yaml"
    file.write_text(Path(DEFAULT).read_text().replace("lr: 3.0e-4", "lr: -1"))
    code, out, _ = flowrl("check", str(file), "--format", "github")
    assert code == 2
    (line,) = out.splitlines()
    assert re.match(r"::error file=.*a%2Cb\.yaml,line=9,col=\d+,endColumn=\d+,title=FR007::models\.policy", line)
    assert "%0Afix: " in line


def test_several_files_are_checked_in_one_go() -> None:
    code, out, err = flowrl("check", DEFAULT, "nowhere.yaml", str(ROOT / "examples/custom_node/pipeline.yaml"))
    assert code == 2
    assert out.count("fine, ") == 2
    assert "error[FR001] nowhere.yaml:1:1" in err


def test_what_cannot_be_run_yet_can_be_checked_planned_and_drawn_but_not_run() -> None:
    machines = ("--set", "pools.train={workers: 2, nodes: 2}")
    for command in (("check",), ("plan",), ("show", "--unroll", "2")):
        code, out, _ = flowrl(command[0], DEFAULT, *machines, *command[1:])
        assert (code, bool(out)) == (0, True), command
    for command in (("run",), ("run", "--dry-run")):
        code, out, err = flowrl(command[0], DEFAULT, *machines, *command[1:])
        assert code == 2
        assert "error[FR079] --set:1:" in err


def test_a_dry_run_says_how_the_pools_fit_this_machine() -> None:
    cores = len(os.sched_getaffinity(0))
    code, out, err = flowrl("run", DEFAULT, "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith(flowrl("plan", DEFAULT)[1].rstrip("\n")), "the same page"
    assert f"this machine: 1 of {cores} CPU asked for: it fits" in out
    code, out, err = flowrl("run", DEFAULT, "--dry-run", "--set", "pools.train={workers: 64, cpus_per_worker: 64}")
    assert (code, "error[FR051]" in err) == (2, True)
    assert f"the pools ask for 4096 CPU; present: {cores} CPU" in err
    assert "one worker a pool" in flowrl("run", DEFAULT, "--dry-run", "--local")[1]


@pytest.mark.parametrize("view", ["tree", "mermaid", "dot", "html", "json", "resolved"])
def test_every_picture_can_be_printed_or_written(view: str, tmp_path: Path) -> None:
    code, out, _ = flowrl("show", DEFAULT, "--as", view)
    assert code == 0
    assert "rollout" in out
    path = tmp_path / "picture"
    code, nothing, err = flowrl("show", DEFAULT, "--as", view, "-o", str(path))
    assert (code, nothing) == (0, "")
    assert path.read_text() == out
    assert str(path) in err


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = flowrl("show", DEFAULT, "-o", str(tmp_path / "file" / "picture"))
    assert (code, err.startswith("error: cannot write")) == (2, True)
    assert flowrl("show", DEFAULT, "-o", str(tmp_path / "new" / "picture"))[0] == 0


def test_without_graphviz_the_svg_says_what_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = flowrl("show", DEFAULT, "--as", "svg")
    assert (code, out) == (2, "")
    assert "mermaid" in err
    assert "html" in err


def test_a_terminal_of_an_old_locale_gets_what_it_can_show() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    run = [sys.executable, "-m", "flowrl", "show", DEFAULT]
    done = subprocess.run(run, env=environment, capture_output=True, encoding="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "rollout  [rollout.generate]" in done.stdout


def test_a_dry_run_finds_what_a_run_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for more in ((), ("--dry-run",)):
        code, _, err = flowrl("run", DEFAULT, *more, "--set", f"run.dir={tmp_path / 'file' / 'runs'}")
        assert (code, "error[FR001] --set:1:" in err) == (2, True)
    assert flowrl("run", DEFAULT, "--dry-run", "--set", f"run.dir={tmp_path / 'a' / 'b'}")[0] == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "nothing is left behind"


def test_to_nodes_stops_before_training() -> None:
    code, out, _ = flowrl("check", DEFAULT, "--to-nodes", "advantage")
    assert (code, "fine, 3 nodes" in out) == (0, True)
    assert "actor_update" not in flowrl("plan", DEFAULT, "--to-nodes", "advantage")[1]
    assert flowrl("show", DEFAULT, "--to-nodes", "advantge")[0] == 2


def test_diff_compares_and_tells_by_its_exit_code_when_asked() -> None:
    other = str(ROOT / "examples/custom_node/pipeline.yaml")
    assert flowrl("diff", DEFAULT, DEFAULT, "--exit-code")[:2] == (0, "no difference\n")
    code, out, _ = flowrl("diff", DEFAULT, other)
    assert (code, "+ reward -> shape (raw_reward)" in out) == (0, True)
    assert flowrl("diff", DEFAULT, other, "--exit-code")[0] == 1
    assert json.loads(flowrl("diff", DEFAULT, other, "--format", "json")[1])["changes"]
    assert flowrl("diff", DEFAULT, "nowhere.yaml")[0] == 2


def test_a_shipped_pipeline_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: grpo_sync\nname: mine\n")
    assert flowrl("check", "grpo_sync", "mine.yaml")[0] == 0
    Path("wrong.yaml").write_text("extends: grpo_sink\nname: mine\n")
    code, _, err = flowrl("check", "wrong.yaml")
    assert (code, "did you mean 'grpo_sync'?" in err) == (2, True)
    Path("grpo_sync").write_text("name: [\n")
    assert "FR002" in flowrl("check", "grpo_sync")[2], "a file of that name comes first"


def test_the_pre_commit_hook_runs_the_check_on_pipelines() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "flowrl check"
    assert hook["language"] == "system"
    assert re.search(hook["files"], "pipelines/grpo_sync.yaml")
    assert re.search(hook["files"], "rl/pipelines/mine.yml")
    assert not re.search(hook["files"], ".github/workflows/ci.yaml")
