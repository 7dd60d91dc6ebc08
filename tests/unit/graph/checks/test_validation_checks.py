"""What is found wrong with a validation before anything starts, and what of it only follows from another mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.errors import PipelineError, Problem

DEFAULT = Path(__file__).parents[4] / "pipelines" / "grpo_sync.yaml"
VAL = "data.val={type: arithmetic, size: 8, seed: 1}"
CODE = '''
from typing import NamedTuple

from flowrl import Evaluation, Node, Prompt, Rows, Sample, Token


class Plain(Node):
    """A rollout without any setting."""

    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    class Out(NamedTuple):
        rows: Rows
        other: Sample[str]

    def run(self, prompt: Prompt[str]) -> Out:
        raise NotImplementedError


class Trains(Node):
    scope = "batch"
    weights = "updates"
    pure = False
    device = "accelerator"

    class Out(NamedTuple):
        after: Sample[float]

    def run(self, reward: Sample[float]) -> Out:
        raise NotImplementedError


class Texts(Evaluation):
    def run(self, other: Sample[str], level: Prompt[int] | None = None) -> None:
        pass


class Prompts(Evaluation):
    def run(self, prompt: Prompt[str]) -> None:
        pass
'''


def problems(*sets: str, settings: str = "", val: str = VAL, name: str = "accuracy") -> list[Problem]:
    """Of the default pipeline with an evaluation."""
    use = "" if "use:" in settings else "use: evaluate.accuracy, "
    added = f"nodes.{name}={{{use}{settings}}}"
    return [*flowrl.load(DEFAULT, [val, added, *sets]).check()]


def only(*sets: str, **settings: Any) -> Problem:
    (found,) = problems(*sets, **settings)
    return found


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path / "own.py"


def test_a_right_validation_has_no_problem() -> None:
    assert problems(settings="every: 20, samples: 4, temperature: 0.6, max_tokens: 4, before_training: true") == []
    assert problems(settings="temperature: 0, samples: 2") == []
    assert problems(settings="dataset: train") == [] or "data.val" in problems(settings="dataset: train")[0].fact


@pytest.mark.parametrize(
    ("settings", "val", "fix"),
    [
        ("dataset: vla", VAL, "dataset: val"),
        ("dataset: other", VAL, "dataset: val"),
        ("every: 2", "data.val=null", "data: {val: {type: ...}}"),
        ("dataset: trian", "data.val=null", "dataset: train"),
    ],
)
def test_fr011_an_unknown_data_set(settings: str, val: str, fix: str) -> None:
    found = [problem for problem in problems(settings=settings, val=val) if problem.severity == "error"]
    assert [(problem.code, problem.fix) for problem in found] == [("FR011", fix)]


def test_fr020_validation_data_lacks_a_column_that_an_ancestor_reads(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text('{"prompt": "1+1=", "answr": "2"}\n')
    found = only(val=f"data.val={{type: jsonl, path: {tmp_path / 'val.jsonl'}}}")
    assert (found.code, found.place.path) == ("FR020", "data.val")
    assert found.fact == (
        "nodes.reward reads 'answer', and runs for nodes.accuracy, on the rows of data.val, which has no such column"
    )
    assert found.fix == "give data.val a column 'answer' (str), such as rename: {answer: answr}"
    assert found.notes == ("the columns of data.val: 'prompt' (str), 'answr' (str)",)


def test_fr022_validation_data_has_a_column_of_another_type(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    found = only(val=f"data.val={{type: jsonl, path: {tmp_path / 'val.jsonl'}}}")
    assert (found.code, found.fix) == ("FR022", "write 'answer' as str in data.val")
    assert "but data.val has it as Prompt[int]" in found.fact


def test_an_optional_column_is_that_of_the_validation_data_whatever_the_training_data_has(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 64)
    file = f"{{type: jsonl, path: {tmp_path / 'val.jsonl'}}}"
    reads = {}
    for name, train, val in (("no", "{type: arithmetic}", file), ("yes", file.replace("val.", "train."), VAL[9:])):
        sets = [f"data.train={train}", f"data.val={val}", "nodes.accuracy={use: evaluate.accuracy}"]
        plan = flowrl.load(DEFAULT, sets).plan()
        reads[name] = "data_source" in plan.graph.nodes["accuracy"].reads
        assert plan.graph_of(plan.walks()[0]).nodes.keys() == {"rollout", "reward", "accuracy"}
        assert plan.graph.training.nodes.keys() == plan.graph.nodes.keys() - {"accuracy"}
        assert "data_source" not in plan.graph.training.fields
    assert reads == {"no": False, "yes": True}


def test_fr020_a_column_that_only_validation_data_has_is_no_column_for_training(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n' * 64)
    found = only(f"data.train={{type: jsonl, path: {tmp_path / 'train.jsonl'}}}")
    assert (found.code, found.place.path) == ("FR020", "nodes.reward")
    assert found.fact == "nodes.reward reads 'answer', which nothing writes"


def test_fr020_an_evaluation_without_a_writer_of_rewards() -> None:
    found = [p for p in problems("nodes.reward=null", "nodes.advantage=null") if p.code == "FR020"]
    assert "nodes.accuracy reads 'reward', which nothing writes" in [problem.fact for problem in found]


@pytest.mark.parametrize(
    ("settings", "place"),
    [("samples: 0", "samples"), ("temperature: -1", "temperature"), ("max_tokens: 0", "max_tokens"),
     ("every: 0", "every"), ("max_rows: 0", "max_rows"), ("temperature: .nan", "temperature")],
)  # fmt: skip
def test_fr007_settings_out_of_range(settings: str, place: str) -> None:
    found = only(settings=settings)
    assert (found.code, found.place.path) == ("FR007", f"nodes.accuracy.{place}")


def test_temperature_0_stays_refused_in_training() -> None:
    found = [problem.code for problem in problems("nodes.rollout.temperature=0", settings="temperature: 0")]
    assert found == ["FR007"]


def test_fr026_a_rollout_refuses_what_is_asked_of_it(own: Path) -> None:
    vllm = "nodes.rollout.engine=vllm"
    found = only(vllm, settings="temperature: 3")
    assert (found.code, found.place.path, found.fix) == ("FR026", "nodes.accuracy.temperature", "remove `temperature:`")
    assert "vLLM samples at temperatures up to 2, not at 3" in found.fact
    assert problems(vllm, settings="temperature: 0, samples: 4") == []
    plain = f"nodes.plain={{use: {own}:Plain, model: policy, pool: generate}}"
    found = only(plain, settings=f"use: {own}:Texts, max_tokens: 4")
    assert found.fact.endswith("has no such setting") and found.place.path == "nodes.accuracy.max_tokens"


def test_fr026_sampling_without_anything_that_generates(own: Path) -> None:
    found = only(settings=f"use: {own}:Prompts, temperature: 0.5")
    assert (
        found.fact
        == "nodes.accuracy asks for temperature 0.5: nothing that it reads follows from a node that generates"
    )
    assert problems(settings=f"use: {own}:Prompts") == []


def test_fr031_what_trains_never_runs_on_validation_rows(own: Path) -> None:
    sets = [f"nodes.actor_update={{use: {own}:Trains, model: policy, pool: train}}"]
    found = [p for p in problems(*sets, settings="reads: {reward: after}") if p.severity == "error"]
    (problem,) = found
    assert (problem.code, problem.place.path) == ("FR031", "nodes.accuracy")
    assert problem.fact == "nodes.accuracy would run nodes.actor_update on validation rows, and that trains"
    assert problem.fix == "let accuracy read only what comes before actor_update"


def test_fr031_two_evaluations_of_one_data_set_have_names_of_their_own() -> None:
    greedy = "nodes.greedy={use: evaluate.accuracy, temperature: 0"
    found = only(greedy + "}")
    assert (found.code, found.place.path, found.fix) == ("FR031", "nodes.greedy", "nodes.greedy: {prefix: val_greedy}")
    assert problems(greedy + ", prefix: greedy}") == []


def test_fr014_an_evaluation_writes_no_field(own: Path) -> None:
    own.write_text(
        "from typing import NamedTuple\nfrom flowrl import Evaluation, Sample\n\nclass Writes(Evaluation):\n"
        "    class Out(NamedTuple):\n        share: Sample[float]\n\n    def run(self) -> Out:\n        ...\n"
    )
    (problem,) = [p for p in problems(settings=f"use: {own}:Writes") if p.severity == "error"]
    assert problem.code == "FR014"
    assert f"{own}:4: Writes: an evaluation reports metrics about a whole data set" in problem.fact


def test_every_works_for_what_trains_nothing_and_says_so_where_it_does_not(own: Path) -> None:
    penalty = "use: reward.length_penalty, budget: 8"
    looks = f"nodes.more={{{penalty}, every: 5}}"
    assert [problem.code for problem in problems(looks)] == ["FR030"]  # nobody reads it, as without `every:`
    thrice = [f"nodes.{name}.every=3" for name in ("reward", "advantage", "actor_update", "weight_sync")]
    assert {problem.code for problem in problems(*thrice)} == {"FR079"}
    assert "FR029" in {problem.code for problem in problems(*thrice[:2])}
    codes = {p.place.path: p.code for p in problems("nodes.rollout.every=2") if p.severity == "warning"}
    assert codes["nodes.rollout.every"] == "FR079"


def test_fr029_is_not_about_evaluations_which_have_their_rows_written_anew() -> None:
    strict = "nodes.strict={use: reward.exact_match, writes: {reward: strict_reward}, every: 3}"
    found = problems(strict, settings="every: 2, reads: {reward: strict_reward}")
    assert [(problem.code, problem.place.path) for problem in found] == [("FR078", "nodes.strict.every")]


def test_a_validation_set_that_cannot_be_read_is_reported_once(tmp_path: Path) -> None:
    found = only(val=f"data.val={{type: jsonl, path: {tmp_path / 'lost.jsonl'}}}")
    assert (found.code, found.place.path) == ("FR018", "data.val.path")


@pytest.mark.parametrize("text", ["", '{"prompt": "a long prompt, longer than four tokens", "answer": "1"}\n'])
def test_an_empty_validation_set_is_refused_before_anything_starts(text: str, tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text(text)
    columns = "columns: {prompt: str, answer: str}"
    val = f"data.val={{type: jsonl, path: {tmp_path / 'val.jsonl'}, max_prompt_tokens: 4, {columns}}}"
    sets = [val, "nodes.accuracy={use: evaluate.accuracy}", f"run.dir={tmp_path / 'runs'}", "nodes.rollout.engine=fake"]
    with pytest.raises(PipelineError) as caught:
        flowrl.load(DEFAULT, sets).run(local=True)
    assert {problem.code for problem in caught.value.problems} == {"FR018"}
    assert not (tmp_path / "runs").exists()


def test_the_training_data_may_be_validated_on() -> None:
    assert problems(val="data.val=null", settings="dataset: train, max_rows: 8") == []
