"""Every check: the fact it states, the fix it gives, and what it withholds because it only follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_nodes import document

from flowrl import Pipeline
from flowrl.errors import Problem
from flowrl.pipeline import load

MODELS = {"policy": {"path": "x", "trainable": True}}
POOLS: dict[str, Any] = {"gpu": {}}
ON = {"model": "policy", "pool": "gpu"}
ROLLOUT = {"use": "Rollout", **ON}
OLD = {"use": "Read", **ON}
UPDATE = {"use": "Update", **ON}
SYNC = {"use": "Sync", "model": "policy"}
GOOD = {"rollout": ROLLOUT, "old": OLD, "update": UPDATE, "sync": SYNC}

DEFAULT = Path(__file__).parents[4] / "pipelines" / "grpo_sync.yaml"


def check(nodes: dict[str, Any], **sections: Any) -> tuple[Problem, ...]:
    return Pipeline(document(nodes, **{"models": MODELS, "pools": POOLS} | sections)).check()


def errors(nodes: dict[str, Any], **sections: Any) -> list[Problem]:
    return [problem for problem in check(nodes, **sections) if problem.severity == "error"]


def only(nodes: dict[str, Any], **sections: Any) -> Problem:
    """The single problem, warnings included."""
    (problem,) = check(nodes, **sections)
    return problem


def test_a_right_pipeline_has_no_problem() -> None:
    assert check(GOOD) == ()


@pytest.mark.parametrize(
    ("use", "fact", "fix"),
    [
        (
            "reward.exact_mach",
            "nodes.judge: no library node is called 'reward.exact_mach'; did you mean 'reward.exact_match'?",
            "`flowrl nodes` lists the library",
        ),
        ("stub_nodes:Juge", "nodes.judge: 'stub_nodes' has no class 'Juge'; did you mean 'Judge'?", "./FILE.py:CLASS"),
        ("no_such:Judge", "nodes.judge: no module named 'no_such'", "./FILE.py:CLASS"),
    ],
)
def test_fr009_unknown_node(use: str, fact: str, fix: str) -> None:
    problem = only({**GOOD, "judge": {"use": use}})
    assert (problem.code, problem.fact, problem.place.path) == ("FR009", fact, "nodes.judge.use")
    assert problem.fix.startswith(fix)


def test_fr010_unknown_model() -> None:
    problem = only({**GOOD, "old": {**OLD, "model": "polcy"}})
    assert (problem.code, problem.fix) == ("FR010", "did you mean 'policy'?")
    assert problem.fact == "nodes.old uses model 'polcy', which is not under models:"


def test_fr012_unknown_pool() -> None:
    problem = only({**GOOD, "old": {**OLD, "pool": "gpus"}})
    assert (problem.code, problem.fix) == ("FR012", "did you mean 'gpu'?")
    assert problem.fact == "nodes.old runs on pool 'gpus', which is not under pools:"


@pytest.mark.parametrize("section", ["models", "pools"])
def test_a_section_of_the_wrong_kind_is_one_problem(section: str) -> None:
    problem = only(GOOD, **{section: 3})
    assert (problem.code, problem.place.path) == ("FR006", section)


def test_without_a_section_its_first_entry_is_the_fix() -> None:
    assert {p.fix for p in errors(GOOD, models={}) if p.code == "FR010"} == {"models: {policy: {path: ...}}"}
    assert {p.fix for p in errors(GOOD, pools={}) if p.code == "FR012"} == {"pools: {gpu: {workers: 1}}"}


@pytest.mark.parametrize("key", ["pool", "model"])
def test_a_misspelt_engine_key_is_one_problem(key: str) -> None:
    misspelt = {name if name != key else name + "s": value for name, value in OLD.items()}
    problem = only({**GOOD, "old": misspelt})
    assert (problem.code, problem.fix) == ("FR005", f"did you mean '{key}'?")


@pytest.mark.parametrize(
    ("pools", "fact", "fix"),
    [
        (
            {"gpu": {"shares": "gqu"}},
            "pools.gpu shares the workers of 'gqu', which is not under pools:",
            "shares: null",
        ),
        (
            {"gpu": {"shares": "b"}, "b": {"shares": "gpu"}},
            "pools.gpu shares workers in a circle: gpu shares b shares gpu",
            "let one of them have `workers:`",
        ),
    ],
)
def test_fr012_shares_of_no_pool_or_in_a_circle(pools: dict[str, Any], fact: str, fix: str) -> None:
    found = errors(GOOD, pools=pools)
    assert {problem.code for problem in found} == {"FR012"}
    assert (found[0].fact, found[0].fix) == (fact, fix)


def test_fr013_unknown_port() -> None:
    problem = only({**GOOD, "judge": {"use": "Judge", "reads": {"respnse": "response"}}})
    assert (problem.code, problem.fact, problem.fix) == (
        "FR013", "nodes.judge has no input 'respnse'", "did you mean 'response'?"
    )  # fmt: skip
    problem = only({**GOOD, "judge": {"use": "Judge", "writes": {"scor": "reward"}}})
    assert (problem.code, problem.fact) == ("FR013", "nodes.judge has no output 'scor'")


def test_fr013_a_list_where_one_field_is_read_and_an_empty_one() -> None:
    problem = only({**GOOD, "judge": {"use": "Judge", "reads": {"response": ["response", "response"]}}})
    assert (problem.code, problem.fix) == ("FR013", "reads: {response: response}")
    assert problem.fact == "nodes.judge: input 'response' takes one field, not a list"
    problem = only({"mix": {"use": "Mix", "reads": {"inputs": []}}}, models={}, pools={})
    assert problem.fact == "nodes.mix: input 'inputs' takes at least one field"


def test_fr014_a_class_that_breaks_the_rules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from flowrl import Node\nclass Mine(Node):\n    def run(self, x): ...\n")
    problem = only({**GOOD, "mine": {"use": f"{tmp_path}/mine.py:Mine"}})
    assert (problem.code, problem.fact) == (
        "FR014", f"nodes.mine: {tmp_path}/mine.py:2: Mine.run: 'x' has no type hint",
    )  # fmt: skip


def test_fr019_a_node_with_weights_names_a_model_and_others_do_not() -> None:
    problem = only({**GOOD, "old": {"use": "Read", "pool": "gpu"}})
    assert (problem.code, problem.fix) == ("FR019", "model: policy")
    assert problem.fact == "nodes.old (stub_nodes:Read) works on a model but names none"
    problem = only({**GOOD, "judge": {"use": "Judge", "model": "policy"}})
    assert (problem.code, problem.fix) == ("FR019", "remove `model:`")


def test_fr020_a_field_that_nothing_writes() -> None:
    problem = only({**GOOD, "judge": {"use": "Judge", "reads": {"response": "answers"}}})
    assert (problem.code, problem.fact) == ("FR020", "nodes.judge reads 'answers', which nothing writes")
    assert problem.place.path == "nodes.judge.reads.response"
    assert "'response' (Sample[str], written by rollout) has the right type" in problem.notes
    assert problem.fix == "reads: {response: response}"


def test_fr020_tells_the_near_name_first_and_the_missing_type_last() -> None:
    nodes = {
        "a": {"use": "Source", "writes": {"value": "reward_math"}},
        "b": {"use": "Source", "writes": {"value": "zzz"}},
    }
    near = next(
        p for p in check({**nodes, "m": {"use": "Mix", "reads": {"inputs": ["reward_maths"]}}}) if p.code == "FR020"
    )
    assert near.fix == "reads: {inputs: reward_math}"
    assert "did you mean 'reward_math'?" in near.notes
    alone = next(p for p in check({"update": UPDATE}) if p.code == "FR020")
    assert alone.fix == "add a node that writes 'response_mask' (Token[bool]), such as {use: rollout.generate}"


def test_fr020_an_optional_port_that_the_settings_demand() -> None:
    nodes = {"a": {"use": "Source"}, "b": {"use": "Optional", "writes": {"value": "v2"}, "eager": True}}
    assert [p.fact for p in errors(nodes)] == ["nodes.b reads 'extra', which nothing writes"]


def test_fr021_two_writers() -> None:
    (problem,) = errors({"a": {"use": "Source"}, "b": {"use": "Source"}})
    assert (problem.code, problem.fact) == ("FR021", "nodes.b writes 'value', which nodes.a writes already")
    assert problem.fix == "writes: {value: value_b}"
    (problem,) = errors({"a": {"use": "Source", "writes": {"value": "prompt"}}})
    assert problem.fact == "nodes.a writes 'prompt', which the training data writes already"


def test_fr022_a_sample_read_as_token() -> None:
    problem = only({**GOOD, "judge": {"use": "Judge", "reads": {"response": "response_mask"}}})
    assert problem.code == "FR022"
    assert problem.fact == "nodes.judge reads 'response_mask' as Sample[str], but rollout writes it as Token[bool]"
    assert problem.fix == "reads: {response: a field of type Sample[str]}"
    assert problem.notes == ("'response' (Sample[str], written by rollout) has the right type",)


def test_fr022_a_class_of_the_users_is_told_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from typing import NamedTuple\nfrom flowrl import Node, Sample, Token\nclass Mine(Node):\n"
        "    class Out(NamedTuple):\n        advantages: Sample[float]\n        loss_mask: Token[bool]\n"
        "    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:\n"
        "        return self.Out(reward, response_mask)\n"
    )
    mine = f"nodes.advantage={{use: '{tmp_path}/mine.py:Mine'}}"
    (problem,) = load("grpo_sync", [mine]).check()
    assert problem.code == "FR022"
    made = "let advantage write Token[float] (.per_token(...) makes it of Sample[float]), or reads: {advantages: "
    assert problem.fix.startswith(made)


def test_fr023_a_trained_model_that_generates_needs_a_sync() -> None:
    problem = only({name: GOOD[name] for name in ("rollout", "old", "update")})
    assert (problem.code, problem.fix) == ("FR023", "weight_sync: {use: sync.weights, model: policy}")
    assert "nodes.rollout generates with model 'policy', which update trains" in problem.fact


def test_fr024_update_of_a_frozen_model() -> None:
    problem = only(GOOD, models={"policy": {"path": "x"}})
    assert (problem.code, problem.fix) == ("FR024", "models.policy: {trainable: true}")
    assert problem.fact == "nodes.update updates model 'policy', which is frozen"


def test_fr025_two_updates_or_two_syncs_of_one_model() -> None:
    facts = [p.fact for p in check({**GOOD, "sync2": SYNC, "update2": UPDATE}) if p.code == "FR025"]
    assert facts == [
        "nodes.update2 is a second update of model 'policy' beside nodes.update",
        "nodes.sync2 is a second weight sync of model 'policy' beside nodes.sync",
    ]


def test_fr010_a_model_folder_that_is_not_there() -> None:
    problem = only(GOOD, models={"policy": {"path": "/no/such/folder", "trainable": True}})
    assert (problem.code, problem.fact) == ("FR010", "models.policy: there is no folder '/no/such/folder'")


def test_fr026_settings_that_do_not_go_with_what_is_read() -> None:
    sources = {name: {"use": "Source", "writes": {"value": name}} for name in ("x", "y")}
    total = {"use": "reward.weighted_sum", "reads": {"rewards": ["x", "y"]}, "coefficients": [1.0]}
    (problem,) = errors({**sources, "total": total})
    assert problem.code == "FR026"
    assert "1 coefficients for 2" in problem.fact
    assert [p.code for p in errors({**sources, "total": {**total, "reads": {"rewards": []}}})] == ["FR013"]


def test_fr027_a_sync_of_a_model_that_nothing_trains() -> None:
    problem = only({"rollout": ROLLOUT, "sync": SYNC})
    assert (problem.code, problem.fix) == ("FR027", "nodes.sync: null")
    assert problem.fact == "nodes.sync syncs the weights of model 'policy', which no node trains"
    assert [p.code for p in errors({**GOOD, "update": {**UPDATE, "model": "polcy"}})] == ["FR010"]


def test_fr030_wasted_nodes_and_models_are_warned_of() -> None:
    problem = only({**GOOD, "judge": {"use": "Judge"}})
    assert (problem.code, problem.severity, problem.fix) == (
        "FR030",
        "warning",
        "nodes.judge: null, or run.prune: true",
    )
    assert problem.fact == "nobody reads what nodes.judge writes ('score'): it is wasted work"
    problem = only(GOOD, models={**MODELS, "spare": {"path": "x"}})
    assert (problem.code, problem.fact, problem.fix) == ("FR030", "no node uses models.spare", "models.spare: null")


def test_fr040_a_cycle_is_printed_as_a_path_with_its_fields() -> None:
    nodes = {
        "a": {"use": "Mix", "reads": {"inputs": ["z"]}, "writes": {"value": "x"}},
        "b": {"use": "Mix", "reads": {"inputs": ["x"]}, "writes": {"value": "y"}},
        "c": {"use": "Mix", "reads": {"inputs": ["y"]}, "writes": {"value": "z"}},
        "self": {"use": "Mix", "reads": {"inputs": ["w"]}, "writes": {"value": "w"}},
    }
    cycle, loop = errors(nodes, models={}, pools={})
    assert cycle.code == loop.code == "FR040"
    assert cycle.fact == "these nodes wait for each other: a -[x]-> b -[y]-> c -[z]-> a"
    assert loop.fact == "these nodes wait for each other: self -[w]-> self"
    assert cycle.fix == "let a read a field that does not depend on c"


def test_fr040_a_cycle_may_run_over_weights() -> None:
    old = {**OLD, "reads": {"response_mask": "late"}, "writes": {"log_probs": "old"}}
    nodes = {**GOOD, "old": old, "update": {**UPDATE, "use": "Writer"}}
    problem = only(nodes)
    assert problem.fact == "these nodes wait for each other: old -[weights of policy]-> update -[late]-> old"
    assert problem.fix == "let old read a field that does not depend on update"


def test_fr050_a_model_needs_a_pool_of_its_own() -> None:
    problem = only({**GOOD, "rollout": {"use": "Rollout", "model": "policy"}})
    assert (problem.code, problem.fix) == ("FR050", "pool: gpu")
    assert problem.fact.startswith("nodes.rollout (stub_nodes:Rollout) holds a model and needs a pool of its own")


def test_fr053_a_sync_takes_no_pool() -> None:
    problem = only({**GOOD, "sync": {**SYNC, "pool": "gpu"}})
    assert (problem.code, problem.fix) == ("FR053", "remove `pool:`")
    assert problem.fact.startswith("nodes.sync takes no pool")


def test_fr054_readers_of_weights_live_with_their_update() -> None:
    problem = only({**GOOD, "old": {**OLD, "pool": "other"}}, pools={**POOLS, "other": {}})
    assert (problem.code, problem.fix) == ("FR054", "pool: gpu")
    assert (
        problem.fact
        == "nodes.old reads the weights of 'policy' on pool 'other', but nodes.update trains them on pool 'gpu'"
    )
    assert check({**GOOD, "old": {**OLD, "pool": "other"}}, pools={**POOLS, "other": {"shares": "gpu"}}) == ()


def test_fr060_minibatches_divide_the_batch() -> None:
    problem = only({**GOOD, "update": {**UPDATE, "minibatch": 3}})
    assert (problem.code, problem.fix) == ("FR060", "minibatch: 2")
    assert problem.fact == "nodes.update: mini-batches of 3 prompts do not divide the batch of 4 prompts"
    assert problem.place.path == "nodes.update.minibatch"


def test_fr060_more_updates_than_prompts_is_refused_not_a_crash() -> None:
    schedule = {"mode": "separate_async", "updates_per_sync": 64}
    assert {problem.code for problem in errors(GOOD, schedule=schedule)} == {"FR060", "FR071"}


def test_fr061_every_rank_gets_a_row() -> None:
    problem = only(GOOD, pools={"gpu": {"workers": 3}})
    assert (problem.code, problem.fix) == ("FR061", "minibatch: 2, or pools.gpu.workers: 2")
    assert "a mini-batch of 1 prompts x 2 samples has 2 rows for 3 workers" in problem.fact


def test_fr079_what_cannot_be_run_yet_is_a_warning_of_the_check() -> None:
    every = {name: {**GOOD[name], "every": 2} for name in ("old", "update", "sync")}
    facts = [problem.fact for problem in check({**GOOD, **every})]
    what = "'every:' of a node that training needs cannot be run by this version yet"
    assert facts == [f"nodes.{name}: {what}" for name in every]


def test_fr080_a_run_to_go_on_from_must_be_there() -> None:
    assert check(GOOD, checkpoint={"every": 5, "resume": "never"}) == check(GOOD)
    problem = only(GOOD, checkpoint={"resume": "nevr"})
    assert (problem.code, problem.place.path, problem.fix) == ("FR080", "checkpoint.resume", "did you mean 'never'?")


def test_no_node_can_be_called_data() -> None:
    (problem,) = errors({**GOOD, "data": {"use": "Judge"}})
    assert (problem.code, problem.place.path) == ("FR007", "nodes.data")


def test_a_failure_policy_must_be_possible() -> None:
    problem = only({**GOOD, "update": {**UPDATE, "on_error": "retry"}})
    assert (problem.code, problem.fix) == ("FR007", "on_error: fail")
    assert problem.fact == "nodes.update (stub_nodes:Update) cannot have on_error: retry"


def test_a_misspelt_engine_key_is_found_among_the_keys_of_every_node() -> None:
    problem = only({**GOOD, "judge": {"use": "Judge", "timout": 3.0}})
    assert (problem.code, problem.fact, problem.fix) == (
        "FR005",
        "nodes.judge has no key 'timout'",
        "did you mean 'timeout'?",
    )


def test_a_key_of_another_section_is_told_where_it_belongs() -> None:
    assert only({**GOOD, "judge": {"use": "Judge", "lr": 0.1}}).fix == "'lr' belongs in models.<name>.optimizer"


# Causes before effects: one mistake is one error.


def test_an_unknown_class_withholds_the_fields_that_it_may_write() -> None:
    problem = only({**GOOD, "rollout": {"use": "rollout.genrate", **ON}})
    assert problem.code == "FR009"


def test_a_misspelt_writer_is_one_error() -> None:
    broken = {
        **GOOD,
        "old": {**OLD, "writes": {"log_prbs": "old"}},
        "spread": {"use": "Read", **ON, "reads": {}, "writes": {}},
    }
    assert [problem.code for problem in errors(broken)] == ["FR013"]
    nodes = {"a": {"use": "Source", "writes": {"valu": "x"}}, "m": {"use": "Mix", "reads": {"inputs": ["x"]}}}
    assert [problem.code for problem in errors(nodes)] == ["FR013"]


def test_a_misspelt_port_is_one_error_even_if_its_own_name_is_unwritten() -> None:
    nodes = {"a": {"use": "Source", "writes": {"value": "x"}}, "m": {"use": "Mix", "reads": {"input": ["x"]}}}
    assert [problem.code for problem in errors(nodes)] == ["FR013"]


def test_a_refused_model_or_pool_is_one_error() -> None:
    assert [problem.code for problem in errors({**GOOD, "old": {**OLD, "model": 3}})] == ["FR006"]
    assert [problem.code for problem in errors({**GOOD, "old": {**OLD, "pool": 3}})] == ["FR006"]


def test_a_refused_batch_is_one_error() -> None:
    nodes = {**GOOD, "update": {**UPDATE, "minibatch": 2}}
    for batch in ({"prompts": 0, "group": 2}, {"prompts": 4}, {"prompts": 4, "group": "2"}, {}):
        assert not [p for p in errors(nodes, batch=batch) if p.code.startswith("FR06")], batch


def test_a_refused_trainable_is_one_error() -> None:
    assert [p.code for p in errors(GOOD, models={"policy": {"path": "x", "trainable": "yes"}})] == ["FR006"]


def test_a_sync_of_an_unknown_model_is_one_error() -> None:
    assert [problem.code for problem in errors({**GOOD, "sync": {**SYNC, "model": "polcy"}})] == ["FR010"]


def test_a_second_writer_of_another_type_is_one_error_wherever_it_stands() -> None:
    second = {"use": "Source", "writes": {"value": "response"}}
    judge = {"use": "Judge"}
    for nodes in ({**GOOD, "judge": judge, "twin": second}, {"twin": second, **GOOD, "judge": judge}):
        assert [problem.code for problem in errors(nodes)] == ["FR021"]


def test_a_warning_waits_until_the_errors_are_gone() -> None:
    found = check({**GOOD, "judge": {"use": "Judge"}, "mix": {"use": "Mix", "reads": {"inputs": ["scores"]}}})
    assert [problem.code for problem in found] == ["FR020"]


def test_five_mistakes_are_five_errors_at_their_lines(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "pipelines" / "grpo_sync.yaml").read_text()
    for before, after in {
        "use: reward.exact_match": "use: reward.exact_mach",
        "temperature: 1.0": "temprature: 1.0",
        "minibatch: 16": "minibatch: 5",
        "lr: 3.0e-4": "lr: .nan",
        "model: reference, pool: train": "model: reference, pool: trian",
    }.items():
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "five.yaml").write_text(text)
    found = load(tmp_path / "five.yaml").check()
    assert sorted(problem.code for problem in found) == ["FR005", "FR007", "FR009", "FR012", "FR060"]
    for problem in found:
        line = text.splitlines()[problem.place.line - 1]
        assert problem.place.text == line
        assert problem.place.column >= 1


def test_a_model_that_is_nearly_called_like_a_shipped_one_is_refused() -> None:
    (problem,) = load(DEFAULT, ["params.base=arith-tinny"]).check()
    assert (problem.code, problem.fix) == ("FR010", "did you mean 'arith-tiny'?")


@pytest.mark.parametrize(
    ("override", "code", "fact"),
    [
        (
            "nodes.rollout.model=reference",
            "FR030",
            "models.policy is trained and synced, but no node generates with it",
        ),
        ("data.val={type: arithmetic}", "FR030", "no node uses data.val"),
        ("pools.extra={workers: 3}", "FR030", "no node uses pools.extra"),
        ("batch.group=1", "FR062", "a group has one sample"),
        ("pools.train={workers: 2, nodes: 2}", "FR079", "'nodes:' cannot be run by this version yet"),
        ("nodes.actor_update.kl_coef=0.0", "FR030", "nobody reads what nodes.ref_logprob writes ('ref_log_probs')"),
    ],
)
def test_what_is_legal_but_surely_not_meant_is_a_warning(override: str, code: str, fact: str) -> None:
    problems = load(DEFAULT, [override]).check()
    assert [(problem.code, problem.severity) for problem in problems] == [(code, "warning")]
    assert fact in problems[0].fact
    assert problems[0].fix


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("pools.train={workers: 3, nodes: 2}", "3 workers cannot be spread evenly over 2 machines"),
        ("models.policy.dtype=bfloat16", "bfloat16 is too narrow to train in"),
        ("models.policy.optimizer.betas=[0.9, 1.0]", "betas[1]"),
    ],
)
def test_what_would_be_ignored_or_go_wrong_in_silence_is_refused(override: str, fact: str) -> None:
    (problem,) = [problem for problem in load(DEFAULT, [override]).check() if problem.severity == "error"]
    assert fact in problem.fact


def test_a_pool_of_the_users_may_be_called_cpu() -> None:
    names = ("rollout", "old_logprob", "ref_logprob", "actor_update")
    overrides = [f"nodes.{name}.pool=cpu" for name in names]
    assert load(DEFAULT, ["pools={cpu: {workers: 1}, train: null, generate: null}", *overrides]).check() == ()
