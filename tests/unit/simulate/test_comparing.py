"""`flowrl plan --compare`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowrl.cli import app
from flowrl.pipeline import load
from flowrl.simulate.compare import Comparison, compare
from flowrl.simulate.estimate import DEVICES, estimate
from flowrl.simulate.gantt import Bar, chart, letters, merged
from flowrl.simulate.gantt import as_text as gantt
from flowrl.simulate.page import as_html
from flowrl.simulate.report import as_data, as_text

ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "pipelines" / "grpo_sync.yaml"
MODES = ["sync", "colocate_async", "separate_async"]


def flowrl(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(load(DEFAULT).plan(), lambda plan: estimate(plan, "cpu"), steps=12)


def test_the_command_prints_a_table_charts_and_advice() -> None:
    code, out, err = flowrl(str(DEFAULT), "--compare", "--steps", "6", "--device", "cpu")
    assert (code, err) == (0, "")
    assert out.startswith("grpo_sync: three schedules, simulated\n6 steps of 32 prompts × 8 samples, seed 0; ")
    assert "estimated for workers of 50.0 GFLOP/s and 10 GB/s (cpu); nothing was measured" in out
    assert all(f"\n{mode}: 3 steps from step 2 on\n" in out for mode in MODES)
    assert out.rstrip().splitlines()[-1].startswith(("Fastest: ", "No schedule is faster"))


def test_json_has_every_figure_of_the_table(found: Comparison) -> None:
    code, out, _ = flowrl(str(DEFAULT), "--compare", "--steps", "12", "--device", "cpu", "--format", "json")
    data = json.loads(out)
    assert code == 0
    assert data == json.loads(json.dumps(as_data(found)))
    assert list(data["schedules"]) == MODES
    assert (data["format"], data["steps"], data["warm_up"]) == (1, 12, 3)
    for each in data["schedules"].values():
        assert sum(each["staleness"].values()) == pytest.approx(1.0)
        assert each["step_seconds"] > 0


def test_a_page_is_written_that_fetches_nothing_and_escapes_names(tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    code, _, err = flowrl(str(DEFAULT), "--compare", "--steps", "4", "-o", str(page))
    assert (code, err) == (0, f"written: {page}\n")
    text = page.read_text(encoding="utf-8")
    assert "{{" not in text and "<script" not in text
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    for mode, drawn in zip(MODES, re.findall(r"<svg .*?</svg>", text, re.DOTALL), strict=True):
        svg = ET.fromstring(drawn)
        assert svg.get("aria-label") == mode
        assert len(svg.findall("rect")) > 5
        assert all(float(bar.get("width", "0")) > 0 for bar in svg.findall("rect"))


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = flowrl(str(DEFAULT), "--compare", "--steps", "2", "-o", str(tmp_path / "file" / "page.html"))
    assert code == 2
    assert "cannot write" in err


@pytest.mark.parametrize("option", [("--costs", "x"), ("--steps", "3"), ("--device", "cpu"), ("-o", "page.html")])
def test_options_of_a_comparison_want_one(option: tuple[str, str]) -> None:
    code, out, err = flowrl(str(DEFAULT), *option)
    assert (code, out) == (2, "")
    assert err.endswith("says how to compare schedules; add --compare\n")


def test_a_wrong_pipeline_and_an_unknown_run_are_refused(tmp_path: Path) -> None:
    code, out, err = flowrl(str(DEFAULT), "--compare", "--set", "nodes.reward.use=reward.exact_mach")
    assert (code, out) == (2, "")
    assert "error[FR009]" in err
    code, out, err = flowrl(str(DEFAULT), "--compare", "--costs", "nope", "--set", f"run.dir={tmp_path}")
    assert (code, out) == (2, "")
    assert err == f"error: --costs: 'nope' is no run, neither here nor in '{tmp_path}'\n"
    code, out, err = flowrl(str(DEFAULT), "--compare", "--to-nodes", "advantage")
    assert (code, out, err) == (
        2,
        "",
        "error: no model is trained on what it generates, so all schedules are the same\n",
    )


def test_the_same_comparison_comes_out_the_same(found: Comparison) -> None:
    again = compare(load(DEFAULT).plan(), lambda plan: estimate(plan, "cpu"), steps=12)
    assert as_text(again) == as_text(found)
    assert as_html(again) == as_html(found)


def test_lengths_that_are_given_count(found: Comparison) -> None:
    plan = load(DEFAULT).plan()
    short = estimate(plan, "cpu", response_tokens=2)
    assert short.group_seconds["actor_update"] < found.costs.group_seconds["actor_update"]
    assert str(short.decoding["rollout"].lengths) == "log-normal, 1 tokens on average before the cut at 2"


def test_faster_devices_take_less_time() -> None:
    plan = load(ROOT / "pipelines" / "qwen_gsm8k_8gpu.yaml").plan()
    costs = {name: estimate(plan, name) for name in DEVICES}
    seconds = [costs[name].group_seconds["actor_update"] for name in ("cpu", "a100", "h100")]
    assert seconds == sorted(seconds, reverse=True)
    speeds = [costs[name].decoding["rollout"].tokens_per_second(64) for name in ("cpu", "a100", "h100")]
    assert speeds == sorted(speeds)
    assert all(each.notes == () for each in costs.values())


def test_a_letter_stands_for_one_node(found: Comparison) -> None:
    named = letters(found.own.plan)
    assert len(set(named.values())) == len(named) == 7


def test_a_line_of_the_chart_is_as_wide_as_asked_and_shows_who_works(found: Comparison) -> None:
    plan = found.own.plan
    lines = list(gantt(chart(found.own), letters(plan), 80))
    assert [len(line) for line in lines] == [80] * len(lines)
    train = next(line for line in lines if line.startswith("train/0"))
    assert all(letters(plan)[node] in train for node in ("rollout", "old_logprob", "ref_logprob", "actor_update"))


@pytest.mark.parametrize("columns", [10, 60, 80, 200])
def test_charts_fit_the_terminal_and_are_at_most_as_wide_as_the_page(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = flowrl(str(DEFAULT), "--compare", "--steps", "4", "--device", "cpu")
    lines = [line for line in out.splitlines() if line.startswith("  train/0")]
    assert len(lines) == 3
    assert {len(line) for line in lines[:2]} == {max(min(columns, 120), 2 + len("train/0  ") + 20)}


def test_bars_that_touch_become_one_and_others_do_not() -> None:
    bars = [Bar("a", 0, 0.0, 1.0), Bar("a", 0, 1.1, 2.0), Bar("a", 0, 3.0, 4.0), Bar("b", 0, 4.0, 5.0)]
    assert list(merged(bars, 0.2)) == [Bar("a", 0, 0.0, 2.0), *bars[2:]]


def test_the_plan_alone_imports_no_simulator() -> None:
    run = [sys.executable, "-X", "importtime", "-m", "flowrl", "plan", str(DEFAULT)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "flowrl.graph" in done.stderr
    assert not re.search(r"flowrl\.(simulate|engine|comparing)", done.stderr)


def test_of_large_steps_fewer_are_simulated() -> None:
    large = load(DEFAULT, sets=["batch.prompts=512"]).plan()
    assert compare(large, lambda plan: estimate(plan, "cpu")).own.plan.document.run.steps == 10


def test_a_bound_of_age_that_raises_is_said_under_sync_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from typing import NamedTuple\n"
        "from flowrl import Node, Sample\n\n\n"
        "class Half(Node):\n"
        '    """Half of a reward."""\n\n'
        "    class Out(NamedTuple):\n"
        "        half: Sample[float]\n\n"
        "    def max_staleness(self) -> float:\n"
        '        raise ValueError("no idea")\n\n'
        "    def run(self, reward: Sample[float]) -> Out:\n"
        "        return self.Out(reward * 0.5)\n"
    )
    (tmp_path / "mine.yaml").write_text("extends: grpo_sync\nname: mine\nnodes: {half: {use: ./mine.py:Half}}\n")
    code, _, err = flowrl(str(tmp_path / "mine.yaml"), "--compare")
    assert code == 2
    assert "error: nodes.half: max_staleness() of ./mine.py:Half raised ValueError('no idea')" in err
