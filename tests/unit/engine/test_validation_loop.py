"""Validation between steps: its own rows and sampling, nothing of it in training, and the other way round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import Field, PrivateAttr

import flowrl
from flowrl import Context, Evaluation, Node, Prompt, Rows, Sample, Token, failure, metric
from flowrl.data.stream import PromptStream
from flowrl.engine.local import LocalCluster
from flowrl.engine.loop import Loop
from flowrl.engine.setup import worker_setups
from flowrl.errors import PipelineError, RunError
from flowrl.loading import load_validation
from flowrl.track.history import History

HERE = Path(__file__)
STUBS = HERE.parents[2] / "stub_nodes.py"


def note(log: str, **facts: Any) -> None:
    with Path(log).open("a") as file:
        file.write(json.dumps(facts) + "\n")


class Told(Node):
    """A rollout that writes down what it was called with; the sessions in `lost` fail."""

    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    log: str
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = 8
    lost: tuple[str, ...] = Field((), strict=False)
    _calls: list[int] = PrivateAttr(default_factory=list)

    class Out(NamedTuple):
        rows: Rows
        response: Sample[str]
        response_mask: Token[bool]

    def run(self, prompt: Prompt[str]) -> Iterator[Out]:
        self._calls.append(1)
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens, "calls": len(self._calls)}
        note(self.log, node="rollout", uids=prompt.rows.uids, planned=prompt.rows.planned.tolist(), **settings)
        for uid, size, text in zip(prompt.rows.uids, prompt.rows.planned.tolist(), prompt, strict=True):
            sessions = [session for session in range(size) if f"{uid}_{session}_0" not in self.lost]
            for session in set(range(size)) - set(sessions):
                failure([f"{uid}_{session}_0"], RuntimeError("lost"))
            if sessions:
                rows = Rows([uid], [0] * len(sessions), sessions, planned=[size], settled=[size])
                mask = Token.of(rows, [[True]] * len(sessions), "bool")
                yield self.Out(rows, Sample(rows, [f"{text}{one}" for one in sessions]), mask)


class Odd(Node):
    """Right in every odd session."""

    scope = "group"
    log: str

    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, response: Sample[str]) -> Out:
        note(self.log, node="reward", rows=response.rows.names())
        return self.Out(Sample(response.rows, [float(session % 2) for session in response.rows.session.tolist()]))


class Train(Node):
    """Stands for the update: says which rows it was trained on, and changes the weights."""

    scope = "batch"
    weights = "updates"
    pure = False
    device = "accelerator"
    log: str

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> None:
        note(self.log, node="update", rows=reward.rows.names())
        metric("trained", len(reward), reduce="last")


class Half(Node):
    """Reads the weights on every rank, each of which answers for its share of the rows."""

    weights = "reads"
    device = "accelerator"
    _context: Context = PrivateAttr()

    class Out(NamedTuple):
        log_probs: Token[float]

    def setup(self, context: Context) -> None:
        self._context = context

    def run(self, response_mask: Token[bool]) -> Out:
        own = np.arange(self._context.rank, len(response_mask.rows), self._context.num_ranks)
        share = response_mask.jagged.take(own)
        return self.Out(Token(response_mask.rows.take(own), share.values * -0.5, share.offsets))


class Sums(Evaluation):
    """Adds up what every rank says."""

    def run(self, log_probs: Token[float]) -> None:
        metric("sum", log_probs.values.sum(), reduce="last")


class Look(Node):
    """Looks at rewards now and then."""

    scope = "batch"
    log: str

    def run(self, reward: Sample[float]) -> None:
        note(self.log, node="look", rows=reward.rows.names())


class Count(Evaluation):
    """Counts the rows that it is given, and those that are not there."""

    def run(self, response: Sample[str], prompt: Prompt[str]) -> None:
        metric(f"{self.prefix}/groups", response.rows.num_groups, reduce="last")
        metric(f"{self.prefix}/prompts", len(set(prompt)), reduce="last")
        metric(f"{self.prefix}/planned", response.rows.planned.sum(), reduce="last")
        metric(f"{self.prefix}/rows", len(response), reduce="last")


class Events(History):
    """Keeps the events too."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def event(self, event: Any) -> None:
        self.events.append(event)


def document(log: Path, *, size: int = 5, workers: int = 1, steps: int = 4, **nodes: Any) -> dict[str, Any]:
    own = {"log": str(log)}
    return {
        "flowrl": 1,
        "name": "validation",
        "models": {"policy": {"path": "arith-tiny", "trainable": True}},
        "data": {"train": {"type": "arithmetic", "size": 64}, "val": {"type": "arithmetic", "size": size, "seed": 1}},
        "batch": {"prompts": 2, "group": 2},
        "pools": {"train": {}, "generate": {"workers": workers}},
        "nodes": {
            "rollout": {"use": f"{HERE}:Told", "model": "policy", "pool": "generate", **own},
            "reward": {"use": f"{HERE}:Odd", **own},
            "update": {"use": f"{HERE}:Train", "model": "policy", "pool": "train", **own},
            "sync": {"use": f"{STUBS}:Sync", "model": "policy"},
            **nodes,
        },
        "run": {"steps": steps},
    }


def trained(made: dict[str, Any]) -> Events:
    pipeline = flowrl.Pipeline(made)
    plan = pipeline.plan()
    workers = worker_setups(plan, num_cores=2, can_kill=False)
    cluster, history = LocalCluster(), Events()
    cluster.start(workers)
    prompts = PromptStream(plan.document.data["train"].load(), 0)
    validation = load_validation(plan, pipeline.reading, lambda text: None)
    asyncio.run(Loop(plan, workers, cluster, prompts, history, validation).train())
    return history


def calls(log: Path, node: str) -> list[dict[str, Any]]:
    return [one for one in map(json.loads, log.read_text().splitlines()) if one["node"] == node]


ACCURACY = {"use": "evaluate.accuracy", "every": 2, "samples": 3, "temperature": 0, "max_tokens": 5}


def test_the_engine_gets_exactly_the_sampling_that_is_asked_for_and_training_keeps_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    history = trained(document(log, accuracy=ACCURACY))
    found = calls(log, "rollout")
    theirs = [call for call in found if call["uids"][0].startswith("val:")]
    ours = [call for call in found if call not in theirs]
    assert {(call["temperature"], call["max_tokens"], *call["planned"]) for call in theirs} == {(0.0, 5, 3)}
    assert {(call["temperature"], call["max_tokens"], *call["planned"]) for call in ours} == {(1.0, 8, 2, 2)}
    # All rows once at each validation, no more sessions at a time than in training (4, so one row of 3).
    assert [uid for call in theirs for uid in call["uids"]] == [f"val:u{row}" for row in range(5)] * 2
    assert [call["calls"] for call in found] == list(range(1, len(found) + 1))  # one node, one engine
    assert [set(metrics) & {"val/arithmetic/mean@3"} != set() for metrics in history.metrics] == [False, True] * 2
    assert history.metrics[1]["val/arithmetic/mean@3"] == pytest.approx(1 / 3)
    assert history.metrics[1]["val/arithmetic/rows"] == 5


def test_validation_rows_never_reach_the_update_and_come_after_the_sync(tmp_path: Path) -> None:
    log = tmp_path / "log"
    history = trained(document(log, accuracy={**ACCURACY, "every": 1}))
    rows = [row for call in calls(log, "update") for row in call["rows"]]
    assert len(rows) == 16 and not any(row.startswith("val:") for row in rows)
    assert [step["trained"] for step in history.metrics] == [4.0] * 4
    for step in range(1, 5):
        events = [event for event in history.events if event.step == step]
        names = [(event.node, event.version) for event in events if event.rows and event.rows[0].startswith("val:")]
        sync = next(place for place, event in enumerate(events) if event.node == "sync")
        first = next(place for place, event in enumerate(events) if event.rows and event.rows[0].startswith("val:"))
        assert sync < first
        assert names[-1] == ("accuracy", 0)
        assert {version for node, version in names if node == "rollout"} == {step}  # the weights just synced


def test_training_is_the_same_with_and_without_validation(tmp_path: Path) -> None:
    trained(document(tmp_path / "with", accuracy={**ACCURACY, "before_training": True}))
    trained(document(tmp_path / "without"))
    assert calls(tmp_path / "with", "update") == calls(tmp_path / "without", "update")


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every": 2}, [2, 4]),
        ({"every": 3}, [3]),
        ({"every": 3, "at_end": True}, [3, 5]),
        ({"every": 5, "at_end": True}, [5]),
        ({"every": 9, "before_training": True, "at_end": True}, [0, 5]),
        ({"every": 9}, []),
    ],
)
def test_it_runs_when_asked_for(settings: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    made = document(tmp_path / "log", steps=5, accuracy={"use": "evaluate.accuracy", **settings})
    history = trained(made)
    found = [number for number, metrics in enumerate(history.metrics, 1) if "val/arithmetic/mean@1" in metrics]
    assert [0] * ("val/arithmetic/mean@1" in history.before_training) + found == steps
    assert len(history.metrics) == 5
    assert sorted({event.step for event in history.events if event.node == "accuracy"}) == steps


@pytest.mark.parametrize("workers", [1, 3])
def test_every_row_is_there_also_one_of_which_nothing_is_left(workers: int, tmp_path: Path) -> None:
    rollout = {"lost": ["val:u1_0_0", "val:u1_1_0", "val:u3_1_0"]}
    nodes = {"count": {"use": f"{HERE}:Count", "samples": 2, "prefix": "count"},
             "accuracy": {"use": "evaluate.accuracy", "samples": 2}}  # fmt: skip
    made = document(tmp_path / "log", workers=workers, steps=1, **nodes)
    made["nodes"]["rollout"] |= rollout
    (metrics,) = trained(made).metrics
    assert {name: metrics[f"count/{name}"] for name in ("groups", "planned", "rows")} == {
        "groups": 5, "planned": 10, "rows": 7,
    }  # fmt: skip
    assert (metrics["val/arithmetic/rows"], metrics["val/arithmetic/unscored"]) == (5, 3)
    # Scored are the sessions 0 and 1 of rows 0, 2 and 4, and session 0 of row 3.
    assert metrics["val/arithmetic/mean@2"] == pytest.approx(3 / 7)
    assert metrics["val/arithmetic/pass@2"] == 1.0


def test_evaluations_that_ask_for_the_same_share_what_is_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    nodes = {"one": {"use": "evaluate.accuracy"}, "two": {"use": "evaluate.accuracy", "prefix": "two", "threshold": 2},
             "three": {"use": "evaluate.accuracy", "prefix": "three", "samples": 2}}  # fmt: skip
    (metrics,) = trained(document(log, size=1, steps=1, **nodes)).metrics
    found = [call["planned"] for call in calls(log, "rollout") if call["uids"][0].startswith("val:")]
    assert sorted(found) == [[1], [2]]
    assert {"val/arithmetic/mean@1", "two/arithmetic/mean@1", "three/arithmetic/mean@2"} <= metrics.keys()
    assert {"time/one", "time/two", "time/three"} <= metrics.keys()


def test_a_node_that_only_an_evaluation_needs_never_sees_a_training_row(tmp_path: Path) -> None:
    log = tmp_path / "log"
    other = {"use": f"{HERE}:Odd", "log": str(log.with_name("other")), "writes": {"reward": "val_reward"}}
    accuracy = {"use": "evaluate.accuracy", "every": 2, "reads": {"reward": "val_reward"}}
    history = trained(document(log, strict=other, accuracy=accuracy))
    rows = [row for call in calls(log.with_name("other"), "reward") for row in call["rows"]]
    assert sorted(rows) == sorted([f"val:u{row}_0_0" for row in range(5)] * 2)
    assert not any(row.startswith("val:") for call in calls(log, "reward") for row in call["rows"])
    assert "time/strict" not in history.metrics[1]
    assert history.metrics[1]["val/arithmetic/rows"] == 5


def test_what_reads_the_weights_does_so_on_all_ranks_after_the_update(tmp_path: Path) -> None:
    half = {"use": f"{HERE}:Half", "model": "policy", "pool": "train"}
    made = document(tmp_path / "log", half=half, sums={"use": f"{HERE}:Sums", "samples": 3, "every": 4})
    made["pools"]["train"] = {"workers": 2}
    made["nodes"]["update"] |= {"use": f"{STUBS}:Update"}
    made["nodes"]["update"].pop("log")
    history = trained(made)
    assert [step.get("sum") for step in history.metrics] == [None, None, None, -7.5]
    places = [event.node for event in history.events if event.step == 4]
    assert places.index("update") < places.index("sums")
    theirs = [e for e in history.events if e.node == "half" and e.rows and e.rows[0].startswith("val:")]
    assert {event.worker for event in theirs} == {"train/0", "train/1"}


def test_a_node_that_trains_nothing_runs_in_every_so_many_th_step(tmp_path: Path) -> None:
    log = tmp_path / "log"
    history = trained(document(log, steps=7, look={"use": f"{HERE}:Look", "log": str(log), "every": 3}))
    assert len(calls(log, "look")) == 2
    assert [event.step for event in history.events if event.node == "look"] == [3, 6]
    assert [step["trained"] for step in history.metrics] == [4.0] * 7


def test_metrics_of_training_hold_nothing_of_validation(tmp_path: Path) -> None:
    history = trained(document(tmp_path / "log", accuracy=ACCURACY))
    (without, with_) = history.metrics[:2]
    assert {name for name in with_.keys() - without.keys() if not name.startswith("val/")} == {"time/accuracy"}
    assert with_["rows/failed"] == 0


def test_a_pipeline_may_validate_and_do_nothing_else(tmp_path: Path) -> None:
    made = document(tmp_path / "log", steps=2, accuracy={"use": "evaluate.accuracy"})
    del made["nodes"]["update"], made["nodes"]["sync"]
    assert [step["val/arithmetic/rows"] for step in trained(made).metrics] == [5, 5]
    assert all(call["uids"][0].startswith("val:") for call in calls(tmp_path / "log", "rollout"))


def test_when_all_fails_the_run_ends_and_names_a_validation_row(tmp_path: Path) -> None:
    made = document(tmp_path / "log", size=1, accuracy={"use": "evaluate.accuracy"})
    made["nodes"]["rollout"] |= {"lost": ["val:u0_0_0"]}
    with pytest.raises(RunError, match="lost"):
        trained(made)


def loaded(tmp_path: Path, val: dict[str, Any], files: Sequence[dict[str, Any]] = (), **accuracy: Any) -> list[str]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in files))
    made = document(tmp_path / "log", accuracy={"use": "evaluate.accuracy", **accuracy})
    pipeline = flowrl.Pipeline({**made, "data": {"train": made["data"]["train"], "val": val}}, tmp_path)
    prompts = load_validation(pipeline.plan(), pipeline.reading, lambda text: None)["accuracy"]
    return [f"{prompt.uid} {prompt.row['prompt']}" for prompt in prompts]


ROWS = [{"prompt": f"{number}+0="} for number in range(4)]


def test_rows_come_in_the_order_of_the_data_and_no_more_than_asked_for(tmp_path: Path) -> None:
    val = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    assert loaded(tmp_path, val, ROWS) == [f"val:u{row} {row}+0=" for row in range(4)]
    assert loaded(tmp_path, val, ROWS, max_rows=2) == ["val:u0 0+0=", "val:u1 1+0="]
    assert len(loaded(tmp_path, val, ROWS, max_rows=9)) == 4


def test_rows_of_a_mixture_have_names_of_their_own(tmp_path: Path) -> None:
    one, two = ({"type": "arithmetic", "size": size, "seed": size} for size in (1, 2))
    found = loaded(tmp_path, {"type": "mixture", "sources": {"one": one, "two": two}})
    assert [text.split()[0] for text in found] == ["val:u0", "val:u0s1", "val:u1s1"]


def test_a_stream_must_be_told_where_to_end(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import itertools\n\n\ndef rows():\n    return ({'prompt': f'{number}='} for number in itertools.count())\n"
    )
    val = {"type": "python", "call": str(tmp_path / "endless.py") + ":rows", "columns": {"prompt": "str"},
           "streaming": True}  # fmt: skip
    with pytest.raises(PipelineError, match="read as a stream, of which nobody knows the end"):
        loaded(tmp_path, val)
    assert loaded(tmp_path, val, max_rows=2) == ["val:u0 0=", "val:u1 1="]


def test_two_data_sets_with_one_source_may_not_report_the_same_names(tmp_path: Path) -> None:
    made = document(
        tmp_path / "log",
        accuracy={"use": "evaluate.accuracy"},
        other={"use": "evaluate.accuracy", "dataset": "more"},
    )
    made["data"]["more"] = {"type": "arithmetic", "size": 3, "seed": 9}
    pipeline = flowrl.Pipeline(made)
    with pytest.raises(PipelineError, match="would both report val/arithmetic/"):
        load_validation(pipeline.plan(), pipeline.reading, lambda text: None)
    made["nodes"]["other"]["prefix"] = "more"
    assert trained(made).metrics[0]["more/arithmetic/rows"] == 3
