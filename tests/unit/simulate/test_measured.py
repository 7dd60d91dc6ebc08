"""Costs from the records of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flowrl
from flowrl.cli import app
from flowrl.simulate.costs import Observed
from flowrl.simulate.estimate import estimate
from flowrl.simulate.measured import BadRun, Log, measured, read_log
from flowrl.spec.read import read_document

STUBS = Path(__file__).parents[2] / "stub_nodes.py"
GROUPS, SESSIONS = 4, 2


def document(tmp_path: Path | None = None, **schedule: Any) -> dict[str, Any]:
    return {
        "flowrl": 1,
        "name": "measured",
        "models": {"policy": {"path": "arith-tiny", "trainable": True}},
        "data": {"train": {"type": "arithmetic", "size": 64}},
        "batch": {"prompts": GROUPS, "group": SESSIONS},
        "pools": {"train": {"workers": 1}, "generate": {"shares": "train"}},
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 8,
                "script": {"texts": ["1", "12345"], "tokens_per_second": 25},
            },
            "reward": {"use": "reward.exact_match"},
            "advantage": {"use": "advantage.grpo"},
            "update": {"use": f"{STUBS}:Update", "model": "policy", "pool": "train"},
            "sync": {"use": f"{STUBS}:Sync", "model": "policy"},
        },
        "schedule": {"mode": "sync", **schedule},
        "run": {"steps": 5, "dir": str(tmp_path or "runs"), "samples": {"rows": 0}},
        "tracking": {"type": "none"},
    }  # fmt: skip


PLAN = flowrl.Pipeline(document()).plan()
RESOLVED = PLAN.document.model_copy(
    update={
        "nodes": {
            name: spec.model_copy(update=node.model_dump(mode="json"))
            for name, spec in PLAN.document.nodes.items()
            if (node := PLAN.graph.nodes[name].node) is not None
        }
    }
)
"""As the folder of a run has it."""


def event(node: str, step: int, start: float, end: float, groups: Sequence[str], worker: str = "train/0") -> Any:
    rows = [f"{uid}_{session}_0" for uid in groups for session in range(SESSIONS)]
    return {"node": node, "step": step, "worker": worker, "start": start, "end": end, "rows": rows, "failures": []}


def log(events: Sequence[Any], **metrics: float) -> Log:
    steps = sorted({each["step"] for each in events})
    return Log(RESOLVED, events, {step: {"step": step, **metrics} for step in steps})


def rollout_events(step: int, ends: Sequence[float], start: float = 10.0) -> list[Any]:
    """One block for each group; a block begins when the one before it has ended."""
    begins = [start, *(start + end for end in ends)]
    return [event("rollout", step, begins[n], start + end, [f"u{step}s{n}"]) for n, end in enumerate(ends)]


def test_seconds_of_a_group_are_those_of_all_workers_in_the_median_step() -> None:
    names = [f"u{number}" for number in range(GROUPS)]
    events = [*rollout_events(1, [1.0] * GROUPS)]
    for step, seconds in ((1, 1.0), (2, 2.0), (3, 9.0)):
        events += [event("update", step, 0.0, seconds, [], f"train/{rank}") for rank in (0, 1)]
        events += [event("reward", step, 0.0, 0.5, names[:1]), event("reward", step, 1.0, 2.5, names[1:])]
        events += [event("sync", step, 0.0, seconds / 10, [])]
    found = measured(log(events, **{"time/engine": 0.05}), PLAN, "a run", estimate(PLAN, "cpu"))
    assert found.group_seconds["update"] == pytest.approx(2 * 2.0 / GROUPS)
    assert found.group_seconds["reward"] == pytest.approx(2.0 / GROUPS)
    assert found.sync_seconds == {"sync": pytest.approx(0.2)}
    assert found.call_seconds == pytest.approx(0.05 / len(PLAN.graph.levels))
    assert found.source == "measured in 3 steps of a run"
    assert found.notes == ("advantage: not in that run, so estimated",)


def test_a_run_that_counts_no_tokens_tells_how_long_each_group_took() -> None:
    found = measured(log(rollout_events(2, [1.0, 2.0, 2.0, 7.0])), PLAN, "r", estimate(PLAN, "cpu"))
    decoding = found.decoding["rollout"]
    assert isinstance(decoding.lengths, Observed)
    assert [each.steps * decoding.step_seconds for each in decoding.lengths.responses] == [1.0, 2.0, 2.0, 7.0]


@settings(max_examples=30)
@given(
    step_ms=st.floats(0.1, 50.0), sequence_ms=st.floats(0.01, 5.0),
    lengths=st.lists(
        st.lists(st.integers(5, 400), min_size=GROUPS, max_size=GROUPS, unique=True), min_size=4, max_size=8
    ),
)  # fmt: skip
def test_an_engine_of_known_speed_is_recognised(step_ms: float, sequence_ms: float, lengths: list[list[int]]) -> None:
    """All sessions of a group are equally long here: then a call follows the model exactly."""
    events, metrics = list[Any](), dict[int, dict[str, float]]()
    for step, groups in enumerate(lengths, 2):
        ends, time, done = [], 0.0, 0
        for number, length in enumerate(sorted(groups)):
            num_sequences = SESSIONS * (GROUPS - number)
            time += (length - done) * (step_ms + sequence_ms * num_sequences) / 1e3
            done = length
            ends.append(time)
        events += rollout_events(step, ends, start=0.0)
        metrics[step] = {"rollout/tokens": SESSIONS * sum(groups), "rollout/response_length/max": max(groups)}
    found = measured(Log(RESOLVED, events, metrics), PLAN, "r", estimate(PLAN, "cpu")).decoding["rollout"]
    assert isinstance(found.lengths, Observed)
    assert len(found.lengths.responses) == GROUPS * len(lengths)
    predicted = [
        each.steps * (found.step_seconds + each.width * found.sequence_seconds) for each in found.lengths.responses
    ]
    assert all(seconds > 0 for seconds in predicted)
    if found.sequence_seconds:
        assert found.step_seconds == pytest.approx(step_ms / 1e3, rel=1e-3, abs=1e-7)
        assert found.sequence_seconds == pytest.approx(sequence_ms / 1e3, rel=1e-3, abs=1e-7)
        steps = sorted(each.steps for each in found.lengths.responses)
        assert steps == pytest.approx(sorted(float(length) for groups in lengths for length in groups), rel=1e-2)


def test_what_was_measured_is_what_is_foretold(tmp_path: Path) -> None:
    """A run in this process, whose engine takes its scripted time; the rest takes next to nothing."""
    file = tmp_path / "measured.yaml"
    file.write_text(json.dumps(document(tmp_path / "runs")))
    result = flowrl.load(file).run(local=True, quiet=True)
    name = result.folder.name
    log = read_log(result.folder)
    assert sorted(log.metrics) == [2, 3, 4, 5]
    seconds = [step["time/step"] for step in log.metrics.values()]
    command = ["plan", str(file), "--compare", "--costs", name, "--steps", "8", "--format", "json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["costs"]["source"] == f"measured in 4 steps of {name}"
    assert found["costs"]["notes"] == []
    assert 0.8 * min(seconds) <= found["schedules"]["sync"]["step_seconds"] <= 1.2 * max(seconds)


def test_the_first_step_failed_calls_and_validations_are_left_out(tmp_path: Path) -> None:
    kept = event("rollout", 2, 0.0, 1.0, ["u1"])
    events = [
        event("rollout", 1, 0.0, 9.0, ["u0"]), kept, event("rollout", 2, 1.0, 9.0, ["val:u0"]),
        {**event("reward", 2, 0.0, 9.0, ["u1"]), "failures": [{"rows": ["u1_0_0"], "error": "E"}]},
    ]  # fmt: skip
    (tmp_path / "pipeline.yaml").write_text(json.dumps(document()))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "x": null}}\n' for step in (0, 1, 2)))
    log = read_log(tmp_path)
    assert (log.events, list(log.metrics)) == ([kept], [2])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(BadRun, match=r"metrics\.jsonl, line 2, is no JSON"):
        read_log(tmp_path)


def test_costs_are_read_from_runs_under_sync_that_have_a_step(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(json.dumps(document(mode="colocate_async", max_staleness=0)))
    with pytest.raises(BadRun, match="ran under colocate_async; costs are read from a run under sync"):
        read_log(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(json.dumps(document()))
    with pytest.raises(BadRun, match=r"cannot read .*events\.jsonl"):
        read_log(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "broken')
    with pytest.raises(BadRun, match="has finished no step"):
        read_log(tmp_path)
    (tmp_path / "pipeline.yaml").write_text("nodes: [")
    with pytest.raises(BadRun, match="cannot be read"):
        read_log(tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"end": 0.0}, r"events\.jsonl, line 2, says that reward ended before it began: the clock was set back"),
        ({"start": "yesterday"}, r"events\.jsonl, line 2, is no event of a run"),
        ({"rows": None}, r"events\.jsonl, line 2, is no event of a run"),
        ({"rows": [1, 2]}, r"events\.jsonl, line 2, is no event of a run"),
        ({"start": float("nan")}, r"events\.jsonl, line 2, is no event of a run"),
    ],
)
def test_an_event_that_says_nothing_of_time_is_named(change: dict[str, Any], fault: str, tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(json.dumps(document()))
    events = [event("reward", 1, 1.0, 1.0, ["u0"]), {**event("reward", 2, 1.0, 2.0, ["u1"]), **change}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    with pytest.raises(BadRun, match=fault):
        read_log(tmp_path)


@pytest.mark.parametrize("line", ["[1]", '{"step": null}', "{}"])
def test_so_are_metrics_of_no_step(line: str, tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(json.dumps(document()))
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(BadRun, match=r"metrics\.jsonl, line 1, is not of a step"):
        read_log(tmp_path)


def test_a_run_of_another_pipeline_says_nothing_of_this_one() -> None:
    with pytest.raises(BadRun, match="elsewhere ran none of these nodes: rollout, reward"):
        measured(log([event("judge", 2, 0.0, 1.0, ["u0"])]), PLAN, "elsewhere", estimate(PLAN, "cpu"))


@pytest.mark.parametrize("value", ["a", -5.0, float("nan"), [1]])
@pytest.mark.parametrize("name", ["time/engine", "rollout/tokens", "rollout/response_length/max", "groups/kept"])
def test_a_metric_that_is_no_number_is_named(name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(json.dumps(document()))
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, name: value}) + "\n")
    with pytest.raises(BadRun, match=rf"metrics\.jsonl, line 1, has no number for {name}"):
        read_log(tmp_path)


def test_rounds_of_a_gate_are_told_apart_by_its_decisions_and_not_by_pauses() -> None:
    """Blocks that a busy machine sends late are of one round; the next one begins when the gate has decided on all."""
    base = document()
    base["nodes"]["gate"] = {"use": "filter.informative", "gate": "keep"}
    plan = flowrl.Pipeline(base).plan()
    events = list[Any]()
    for step in (2, 3, 4):
        first = [event("rollout", step, 0.5 * n + 0.2, 0.5 * n + 0.5, [f"u{step}s{n}"]) for n in range(4)]
        again = [event("rollout", step, 2.5, 3.0, [f"u{step}s4"]), event("rollout", step, 3.2, 3.5, [f"u{step}s5"])]
        gate = [event("gate", step, 0.9, 1.0, [f"u{step}s0"])]
        gate += [event("gate", step, 2.1, 2.4, [f"u{step}s{n}" for n in (1, 2, 3)])]
        events += [*first, *again, *gate, event("gate", step, 3.6, 3.7, [f"u{step}s4", f"u{step}s5"])]
    counted = {"rollout/tokens": 6 * SESSIONS * 9.0, "rollout/response_length/max": 9.0, "groups/kept": 4.0}
    found = measured(log(events, **counted), plan, "r", estimate(plan, "cpu"))
    decoding = found.decoding["rollout"]
    assert isinstance(decoding.lengths, Observed)
    assert decoding.sequence_seconds == 0.0
    assert decoding.step_seconds == pytest.approx(1.8 / 9)
    lasted = [each.steps * decoding.step_seconds for each in decoding.lengths.responses[:6]]
    assert lasted == pytest.approx([0.3, 0.8, 1.3, 1.8, 0.5, 1.0])
    assert found.kept == pytest.approx(4 / 6)


def test_costs_that_were_measured_with_other_settings_are_called_so(tmp_path: Path) -> None:
    other = document()
    other["batch"]["group"] = 16
    other["nodes"]["rollout"]["max_tokens"] = 64
    plan = flowrl.Pipeline(other).plan()
    (tmp_path / "pipeline.yaml").write_text(flowrl.Pipeline(document()).resolved())
    then = read_document(tmp_path / "pipeline.yaml").document
    assert then is not None
    events = [each for step in (1, 2) for each in rollout_events(step, [1.0] * GROUPS)]
    run = Log(then, events, {step: {"step": step} for step in (1, 2)})
    (lost, note) = measured(run, plan, "r", estimate(plan, "cpu")).notes
    assert lost.endswith("not in that run, so estimated")
    assert note == ("measured with other settings, which may cost something else: batch.group (2), rollout.max_tokens")
    assert len(measured(run, PLAN, "r", estimate(PLAN, "cpu")).notes) == 1
