"""The page and the data of a dry run: complete, readable, and never a guess."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stub_nodes import document

from flowrl import Pipeline
from flowrl.graph.plan import Plan
from flowrl.graph.show.data import as_data
from flowrl.graph.show.report import as_plan
from flowrl.graph.show.text import WIDTH, human_bytes, human_flops, listed
from flowrl.graph.sizes.measure import lengths_of, measure
from flowrl.graph.words import ordinal
from flowrl.nodes.rollout.generate import Generate
from flowrl.pipeline import load

ROOT = Path(__file__).parents[4]
DEFAULT, BIG = ROOT / "pipelines" / "grpo_sync.yaml", Path(__file__).parents[1] / "seven_billion.yaml"
ASYNC = "schedule={mode: separate_async, warmup_batches: 3, max_staleness: 2, updates_per_sync: 2}"
APART = ["pools.generate={shares: null, workers: 2}", "nodes.actor_update.minibatch=8"]


def page(*sets: str, file: Path = DEFAULT) -> str:
    return as_plan(load(file, sets).plan())


def section(text: str, start: str) -> list[str]:
    return next(part for part in text.split("\n\n") if part.startswith(start)).splitlines()


@pytest.mark.parametrize("file", [DEFAULT, BIG])
def test_the_page_fits_into_a_terminal(file: Path) -> None:
    assert max(len(line) for line in page(file=file).splitlines()) <= WIDTH


def test_the_page_says_what_its_sizes_assume() -> None:
    plan = load(DEFAULT).plan()
    assert "prompts of 56 tokens (policy has 64 positions) and responses of 8 (max_tokens of rollout)" in (
        as_plan(plan).replace("\n", " ")
    )
    given = as_plan(plan, lengths_of(plan, 30, 5)).replace("\n", " ")
    assert "prompts of 30 tokens (as given) and responses of 5 (as given)" in given
    assert "WARNING" not in given


def test_rows_too_long_for_a_model_are_warned_of() -> None:
    plan = load(DEFAULT).plan()
    long = lengths_of(plan, 10_000, 8)
    warning = "WARNING: rows of 10,000 + 8 = 10,008 tokens are more than the 64 positions of policy"
    assert warning in as_plan(plan, long)
    assert as_data(plan, long)["lengths"]["too_long"] == "more than the 64 positions of policy"
    assert as_data(plan)["lengths"]["too_long"] is None


def test_rollouts_that_stop_at_different_lengths_are_told_apart() -> None:
    writes = ", ".join(f"{port}: second_{port}" for port in Generate.output_ports)
    second = (
        f"nodes.second={{use: rollout.generate, model: policy, pool: generate, max_tokens: 3, writes: {{{writes}}}}}"
    )
    plan = load(DEFAULT, [second]).plan()
    text, data = as_plan(plan), as_data(plan)
    assert (
        "prompts of 56 tokens (policy has 64 positions) and responses of 8 (max_tokens of rollout) in the rows of "
        "rollout; prompts of 61 tokens (policy has 64 positions) and responses of 3 (max_tokens of second) in the rows "
        "of second; give others"
    ) in text.replace("\n", " ")
    assert "batch (rows of 56 + 8 = 64 tokens of rollout; 61 + 3 = 64 tokens of second)" in text
    assert {name: own["response_tokens"] for name, own in data["lengths"]["rollouts"].items()} == {
        "rollout": 8, "second": 3,
    }  # fmt: skip
    assert [data["nodes"][name]["batch"]["response_tokens"] for name in ("second", "actor_update")] == [3, 8]


def gated() -> Plan:
    on = {"model": "policy", "pool": "gpu"}
    nodes = {
        "rollout": {"use": "Rollout", **on},
        "score": {"use": "Judge", "every": 1},
        "gate": {"use": "Gate", "gate": "keep"},
        "old": {"use": "Read", **on, "every": 3},
    }
    models = {"policy": {"path": "Qwen/Qwen2.5-0.5B"}}
    return Pipeline(document(nodes, models=models, pools={"gpu": {}})).plan()


def test_what_runs_again_and_what_runs_seldom_is_said() -> None:
    plan = gated()
    text, data, groups = as_plan(plan), as_data(plan), plan.document.batch.prompts
    gate = section(text, "gate: ")
    assert gate[1] == (
        f"  gate keep: runs again with what it depends on until {groups} groups are kept; after 10 rounds the run fails"
    )
    assert next(line for line in gate if "writes keep" in line).endswith("next read by the gate")
    assert section(text, "old: ")[1] == "  every 3rd step"
    (line,) = (line for line in section(text, "columns of a step") if line.startswith("  keep "))
    assert line.split()[-4:] == ["the", "gate", "the", "gate"]
    assert (data["nodes"]["gate"]["gate"], data["nodes"]["gate"]["every"]) == ("keep", 1)
    assert (data["nodes"]["old"]["gate"], data["nodes"]["old"]["every"]) == (None, 3)
    assert data["fields"]["keep"]["readers"] == data["fields"]["keep"]["released_after"] == ["the gate"]


def test_a_node_that_runs_seldom_costs_its_share_of_a_step() -> None:
    sizes = measure(gated())
    flops = {work.node: work.flops for work in sizes.work if isinstance(work.flops, int)}
    assert sizes.average_flops == pytest.approx(flops["rollout"] + flops["old"] / 3, abs=1)
    lines = section(as_plan(gated()), "compute of a step")
    assert any(line.endswith("with logits; every 3rd step: 1/3 in the sum") for line in lines)
    assert human_flops(sizes.average_flops) in lines[-1]


@pytest.mark.parametrize(("num", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"),
                                           (21, "21st"), (111, "111th"), (1002, "1,002nd")])  # fmt: skip
def test_ordinals(num: int, text: str) -> None:
    assert ordinal(num) == text


def test_one_is_not_plural() -> None:
    text = page("batch.prompts=1", "batch.group=1", "nodes.actor_update.minibatch=1", "nodes.rollout.max_tokens=1",
                "run.steps=1", "nodes.rollout.max_sequences=1",
                "nodes.actor_update.max_tokens_per_microbatch=1")  # fmt: skip
    assert not re.findall(r"\b1 (?:\w+ )?\w*(?<!p)(?<!as)s\b(?! a step)", text)


def test_every_field_has_its_bytes_writer_readers_and_end() -> None:
    plan = load(DEFAULT).plan()
    sizes, lines = measure(plan), section(as_plan(plan), "columns of a step")
    for name, field in plan.graph.fields.items():
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert str(field.type) in line
        assert human_bytes(sizes.fields[name].num_bytes) in line
        assert field.writer in line
        assert all(reader in line for reader in field.readers)
        assert line.endswith(sizes.fields[name].released_after[-1] if field.readers else "never stored")


def test_rows_that_do_not_divide_are_said() -> None:
    text = page("pools.train.workers=3", "nodes.actor_update.minibatch=32")
    assert "256 rows on 3 ranks: 80 or 88 rows each" in text
    assert "32 prompts (256 sessions) on 3 workers: 10 or 11 prompts each" in text


def test_memory_of_a_pool_with_a_limit_is_a_share_of_it() -> None:
    lines = section(page(file=BIG), "memory of one worker")
    assert lines[1] == "  pool train: 8 workers, 80.0 GiB each"
    assert next(line for line in lines if line.startswith("    peak")).split("  ")[-1].startswith("78% of the worker: ")
    over = "\n".join(section(page("pools.train.memory_per_worker=50", file=BIG), "memory of one worker"))
    assert "124% of the worker, MORE THAN IT HAS" in over


@pytest.mark.parametrize(
    ("sets", "lines"),
    [
        ([], ["staleness   0 under sync: every token comes from the weights at the start of its step"]),
        (
            [ASYNC, *APART],
            [
                "staleness   a trained token is at most 2 versions old; stale: drop",
                "            a version is a step: 2 batches trained, one sync",
                "            96 prompts in flight: 32 x (1 + the smaller of warmup_batches 3 and max_staleness 2)",
            ],
        ),
    ],
)
def test_staleness_and_what_bounds_it(sets: list[str], lines: list[str]) -> None:
    assert section(page(*sets), "staleness")[: len(lines)] == lines


def test_what_resume_would_do() -> None:
    never = page("checkpoint=null")
    assert never.endswith("resume      never: without checkpoint: a run starts at step 1")
    assert page().endswith(
        "checkpoint  every 50 steps and at the last one; 2 kept\n"
        "resume      auto: a run that did not finish is gone on with"
    )


def test_pruning_says_what_it_saves() -> None:
    lines = section(page("run.prune=true", "nodes.actor_update.kl_coef=0", file=BIG), "pruned")
    assert lines == [
        "pruned (run.prune): nobody needs ref_logprob, model reference",
        "  saves 16.0 PFLOP a step, 1.77 GiB on each worker of train",
    ]


def test_pruning_names_no_saving_of_nothing() -> None:
    extra = "nodes.extra={use: reward.length_penalty, writes: {shaped_reward: unread}}"
    assert section(page("run.prune=true", extra), "pruned")[1] == "  saves nothing measurable"
    judge = ["pools.other={workers: 2}",
             "nodes.extra={use: model.logprob, model: other, pool: other, writes: {log_probs: unread}}",
             "models.other={path: arith-tiny}"]  # fmt: skip
    saved = section(page("run.prune=true", *judge), "pruned")[1]
    assert "worker of other" in saved and "train" not in saved and " 0 " not in saved


def test_a_model_of_unknown_size_is_no_number() -> None:
    text = page("params.base=nobody/nothing")
    assert "the config.json of 'nobody/nothing' is neither in a folder" in text
    assert "  weight_sync: unknown, for the sizes of model policy are" in text
    assert not any("GiB" in line or "FLOP" in line for line in section(text, "compute of a step"))
    assert "peak" not in "\n".join(section(text, "memory of one worker"))


def test_nodes_without_the_conventions_are_planned_without_them() -> None:
    on = {"model": "policy", "pool": "gpu"}
    nodes: dict[str, Any] = {
        "rollout": {"use": "Rollout", **on},
        "old": {"use": "Read", **on},
        "update": {"use": "Update", **on},
        "sync": {"use": "Sync", "model": "policy"},
    }
    models = {"policy": {"path": "Qwen/Qwen2.5-0.5B", "trainable": True}}
    plan = Pipeline(document(nodes, models=models, pools={"gpu": {"workers": 2}})).plan()
    text = as_plan(plan)
    assert "responses of 512 (assumed)" in text.replace("\n", " ")
    assert "micro-batch" not in text
    assert "logits" not in "\n".join(line for line in section(text, "memory") if "in update" in line)
    json.dumps(as_data(plan))


def test_a_pipeline_without_models_has_a_page() -> None:
    text = as_plan(Pipeline(document({"source": {"use": "Source"}})).plan())
    assert "memory" not in text and "compute" not in text and "batch" not in text.split("columns of a step")[1]


@pytest.mark.parametrize("lengths", [(None, None), (1, 1), (100_000, 100_000)])
@pytest.mark.parametrize("sets", [[], [ASYNC, *APART], ["params.base=nobody/nothing"], ["params.base=gpt2"]])
def test_the_data_says_what_the_page_says(sets: list[str], lengths: tuple[int | None, int | None]) -> None:
    plan = load(DEFAULT, sets).plan()
    assumed = lengths_of(plan, *lengths)
    text, data, sizes = as_plan(plan, assumed), as_data(plan, assumed), measure(plan, assumed)
    assert json.loads(json.dumps(data, allow_nan=False)) == data, "plain data"
    assert data["format"] == 1
    for pool, memory in ((pool["memory"], m) for m in sizes.memory for n, pool in data["pools"].items() if n == m.pool):
        assert pool["peak_bytes"] == memory.peak
        assert sum(s["bytes"] for s in pool["shares"] if s["node"] is None) == pool["held_bytes"]
        assert all(human_bytes(share["bytes"]) in text for share in pool["shares"])
    for name, node in data["nodes"].items():
        if node["compute"] and node["compute"]["flops"]:
            assert f"  {name}" in text and human_flops(node["compute"]["flops"]) in text
    for name, field in data["fields"].items():
        assert human_bytes(field["bytes"]) in text
        assert field["released_after"] == [] or set(field["released_after"]) <= set(field["readers"]), name


def test_sizes_are_for_people() -> None:
    assert [human_bytes(num) for num in (0, 1023, 1024, 10 * 1024, 999 * 1024, 3 * 2**40)] == [
        "0 B", "1,023 B", "1.00 KiB", "10.0 KiB", "999 KiB", "3.00 TiB",
    ]  # fmt: skip
    assert [human_flops(num) for num in (5, 5e3, 5e13)] == ["5 FLOP", "5.00 kFLOP", "50.0 TFLOP"]
    assert listed(["a" * 20, "b" * 20, "c" * 20]) == f"{'a' * 20} and 2 more"


def test_the_plan_of_a_7b_model_answers_at_once_and_imports_nothing_heavy() -> None:
    script = (
        "import sys, flowrl.cli\n"
        "from flowrl.graph.show.report import as_plan\n"
        "from flowrl.pipeline import load\n"
        f"as_plan(load({str(BIG)!r}).plan())\n"
        "print([n for n in ('torch', 'transformers', 'ray', 'vllm', 'mlflow', 'accelerate', 'pyarrow') "
        "if n in sys.modules])"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert done.stdout == "[]\n", done.stderr
    assert seconds < 3, "one second on an idle machine"


def test_the_sizes_of_a_large_plan_take_milliseconds() -> None:
    plan = load(DEFAULT, ["batch.prompts=1000000", "data.train.size=1000000", "nodes.actor_update.minibatch=500",
                          "pools.train.workers=1000"]).plan()  # fmt: skip
    start = time.perf_counter()
    measure(plan)
    assert time.perf_counter() - start < 0.2
