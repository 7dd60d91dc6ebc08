"""Judges: what they are asked, how their replies become scores, and servers that are busy, broken or away."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError

import flowrl
from flowrl.batch import Batch, Prompt, Sample
from flowrl.engine.call import NodeSetup
from flowrl.engine.scorer import Scorer
from flowrl.fields import FieldType
from flowrl.launch import refuse_unavailable, rehearse
from flowrl.metrics import Report, collect
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.answers import BadAnswer
from flowrl.nodes.reward.judge import Judge
from flowrl.nodes.reward.judge_model import JudgeModel
from flowrl.registry import find, library_names
from flowrl.rows import Rows
from flowrl.testing import run_node

Answer = tuple[int, Any, dict[str, str]]
"""State, body and headers."""


class Server(ThreadingHTTPServer):
    """Answers every question as `answer` says, and remembers what was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, int], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.running = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
            num_asked = sum(question == sent["messages"][-1]["content"] for _, _, sent in self.server.requests)
        state, answer, headers = self.server.answer(question, num_asked)
        with self.server.lock:
            self.server.running -= 1
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(state)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the judge did not wait
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass


def reply(content: Any) -> Answer:
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}}]}, {}


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, int], Answer]], Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[str, int], Answer]) -> Server:
        servers.append(Server(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(node: Any, responses: list[str], context: Context | None = None) -> tuple[dict[str, float], Report]:
    rows = Rows.of([f"u{index}" for index in range(len(responses))])
    given = {"response": Sample(rows, responses), "prompt": Prompt(rows, [f"question {r}" for r in responses]),
             "answer": Prompt(rows, ["right"] * len(responses))}  # fmt: skip
    with collect() as report:
        out = run_node(node, context=context, **{n: c for n, c in given.items() if node.needs().get(n, True)})
    node.close()
    return dict(sorted(zip(out.reward.rows.names(), out.reward, strict=True))), report


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 7", 0.7),
        ("**Score:** 10/10", 1.0),
        ("score = 0", 0.0),
        ("Score: 3 … no, Score: 4.5", 0.45),
        ("SCORE 1", 0.1),
        ("Score: 7/10", 0.7),
        ("Score: 7 out of 10.", 0.7),
        ("Rating: 8.", 0.8),
        ("Score (0-10): 7", 0.7),
        ("**Score**: __7__", 0.7),
        ('{"score": 7, "why": "it is 9 miles"}', 0.7),
        ("Score: 7.Good", 0.7),
        ("Score: 7\n- 3 points for the error", 0.7),
        ("Score: .5", 0.05),
        ("7", 0.7),
        ("7.5", 0.75),
        ("7/10", 0.7),
        ("**8**", 0.8),
        ("`8`.", 0.8),
    ],
)
def test_a_number_is_read_and_scaled(said: str, score: float) -> None:
    assert Judge(url="fake:").score(said) == pytest.approx(score)


@pytest.mark.parametrize(
    ("settings", "said", "error"),
    [
        ({}, "", "holds no verdict: ''"),
        ({}, "It is fine.", "holds no verdict"),
        ({}, "Score: eleven", "holds no verdict"),
        ({}, "Score: 11", "11 is not between 0 and 10"),
        ({}, "Score: -1", "-1 is not between 0 and 10"),
        ({}, "Score: −1", "'−1' is no number"),
        ({}, "-1", "-1 is not between 0 and 10"),
        ({}, "Score: 1e999", "'1e999' is no number"),
        ({}, "1e999", "'1e999' is no number"),
        ({}, "Score: 7,5", "'7,5' is no number"),
        ({}, "7,5", "'7,5' is no number"),
        ({}, "Score: 0 to 10 possible, I think", "'0 to 10' is no number"),
        ({}, "0 to 10 possible, I think", "holds no verdict"),
        ({}, "Score: 0-10", "'0-10' is no number"),
        ({}, "Score: 7 or 8", "'7 or 8' is no number"),
        ({}, "Score: 3. No, score: 7th", "'7th' is no number"),
        ({}, "Score: 70%", "'70%' is no number"),
        ({}, "Score: 1_0", "'1_0' is no number"),
        ({}, "Score: 4/5", "'4/5' is not on the scale that was set"),
        ({"scale": "none"}, "Score: 4/5", "'4/5' is not on the scale that was set"),
        ({"scale": "none"}, "Score: 1e300", "1e+300, which is more than a score can be"),
        ({"parse": r"(\w+)$"}, "very good", "'good' is no number"),
        ({"parse": r"(\w+)$"}, "nan", "'nan' is no number"),
        ({"parse": r"(\w+)$", "scale": "none"}, "inf", "'inf' is no number"),
        ({"choices": {"yes": 1, "no": 0}}, "perhaps, not now", "holds no verdict"),
        ({"choices": {"yes": 1, "no": 0}, "parse": r"verdict: (\w+)"}, "verdict: maybe", "'maybe' is none of yes, no"),
    ],
)
def test_a_reply_without_a_verdict_is_no_score(settings: Any, said: str, error: str) -> None:
    with pytest.raises(BadAnswer, match=re.escape(error)):
        Judge(url="fake:", **settings).score(said)


def test_words_and_plain_numbers_are_read_as_told() -> None:
    words = Judge(url="fake:", choices={"yes": 1.0, "no": 0.0, "not at all": -1.0})
    assert [words.score(said) for said in ("Yes.", "no, or YES", "Not at all!", "nobody said no")] == [1, 1, -1, 0]
    assert Judge(url="fake:", parse=r"\[\[(-?\d+)\]\]", scale="none").score("[[1]] or [[-5]]") == -5.0
    assert Judge(url="fake:", scale=[1, 5]).score("Score: 2") == 0.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"template": "{respons}"}, "the template names {respons}, which is no field of it"),
        ({"template": "{prompt}"}, "does not show the {response}"),
        ({"parse": "Score: 1"}, "parse has 0 groups"),
        ({"parse": "(a"}, "parse is no regular expression: missing ), unterminated subpattern at character 1"),
        ({"scale": [1, 1]}, "the scale ends at 1"),
        ({"scale": [0, 1], "choices": {"yes": 1}}, "choices are scores already: a scale does not apply to them"),
        ({"scale": "none", "choices": {"yes": 1}}, "choices are scores already"),
        *(
            ({"url": url}, f"'{url}' is no address")
            for url in (
                "localhost:8000",
                "http://",
                "https:///v1",
                "http://:8000",
                "http://here:99999/v1",
                "http://here:x/v1",
                "http://he re/v1",
                "http://[::1",
                "ftp://here",
            )
        ),
        ({"model": "x"}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        Judge(**{"url": "http://here/v1", **settings})


def pipeline(**reward: Any) -> str:
    node = {"use": "reward.judge", "url": "fake:Score: 7", **reward}
    return f"extends: grpo_sync\nnodes: {{reward: {json.dumps(node)}}}\n"


@pytest.mark.parametrize(
    ("text", "sets", "score"),
    [
        (pipeline(), (), 0.7),
        (pipeline(scale="none"), (), 7.0),
        (pipeline(scale=[0, 7]), (), 1.0),
        (pipeline(scale=None), (), 0.7),
        (pipeline(), ("nodes.reward.scale=none",), 7.0),
        (pipeline(scale="none"), ("nodes.reward.scale=null",), 0.7),
        (pipeline(scale="none"), ("nodes.reward.scale=[0, 14]",), 0.5),
        (pipeline(url="fake:yes", choices={"yes": 0.25}), (), 0.25),
    ],
)
def test_a_scale_means_in_yaml_what_it_says(text: str, sets: tuple[str, ...], score: float, tmp_path: Path) -> None:
    (tmp_path / "judge.yaml").write_text(text)
    loaded = flowrl.load(tmp_path / "judge.yaml", sets)
    (tmp_path / "resolved.yaml").write_text(loaded.resolved())
    for pipe in (loaded, flowrl.load(tmp_path / "resolved.yaml")):
        node = pipe.plan().graph.nodes["reward"].node
        assert isinstance(node, Judge)
        assert node.score(node.url.removeprefix("fake:")) == pytest.approx(score)


@pytest.mark.parametrize("scale", ["5", "[0]", "nope", "[a, 1]", "{a: 1}", "[2, 1]"])
def test_a_wrong_scale_is_a_problem_at_its_place(scale: str, tmp_path: Path) -> None:
    (tmp_path / "judge.yaml").write_text(pipeline())
    found = flowrl.load(tmp_path / "judge.yaml", [f"nodes.reward.scale={scale}"]).check()
    (problem,) = [problem for problem in found if problem.severity == "error"]
    assert problem.place.file == "--set"
    assert "nodes.reward.scale" in problem.fact


@pytest.mark.parametrize("use", library_names())
def test_no_parameter_means_something_by_null_that_its_default_is_not(use: str) -> None:
    """For null in YAML is left out."""
    fields = find(use, Path()).load().model_fields.items()
    assert [name for name, field in fields if type(None) in get_args(field.annotation) and field.default] == []


def test_a_key_that_is_not_set_is_a_warning_of_the_check_and_refuses_a_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judge.yaml").write_text(pipeline(url="http://127.0.0.1:9/v1", api_key_env="MY_KEY"))
    monkeypatch.delenv("MY_KEY", raising=False)
    loaded = flowrl.load(tmp_path / "judge.yaml")
    (problem,) = loaded.check()
    assert (problem.code, problem.severity, problem.place.path) == ("FR031", "warning", "nodes.reward.api_key_env")
    with pytest.raises(flowrl.PipelineError, match="MY_KEY"):
        loaded.run(quiet=True)
    with pytest.raises(flowrl.PipelineError, match="MY_KEY"):
        rehearse(loaded.plan(), loaded.reading, local=True, address=None)
    refuse_unavailable(loaded.plan(), loaded.reading, None, address="10.0.0.1:6379")  # the workers there may have it
    monkeypatch.setenv("MY_KEY", "secret")
    assert not flowrl.load(tmp_path / "judge.yaml").check()


def test_the_template_is_filled_once_and_braces_stay() -> None:
    node = Judge(url="fake:", template='{prompt} {{x}} {"score": 1} {response}')
    chat = [{"role": "user", "content": "hello"}]
    turns = [{"role": "system", "content": "be kind"}, *chat]
    assert node.questions(response=["{prompt}", "b", "c"], prompt=["{response}", chat, turns]) == [
        '{response} {x} {"score": 1} {prompt}',
        'hello {x} {"score": 1} b',
        'system: be kind\n\nuser: hello {x} {"score": 1} c',
    ]
    assert node.needs() == {"prompt": True, "answer": False}
    assert Judge(url="fake:", template="{response} {answer}").needs() == {"prompt": False, "answer": True}


def test_a_server_gets_the_question_and_its_reply_is_kept(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):  # no proxy is in the way of this machine
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = serve(lambda question, _: reply(f"Score: {question[-1]}"))
    node = Judge(
        url=server.url + "/", server_model="big", api_key_env="MY_KEY", template="{prompt}|{answer}|{response}",
        max_tokens=5, options={"top_p": 0.5},
    )  # fmt: skip
    scores, report = ask(node, ["1", "2\ud800 2"])
    assert scores == pytest.approx({"u0_0_0": 0.1, "u1_0_0": 0.2})
    assert not report.failures
    (path, headers, body), _ = sorted(server.requests, key=lambda one: str(one[2]))
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "big", "max_tokens": 5, "temperature": 0.0, "top_p": 0.5,
        "messages": [{"role": "user", "content": "question 1|right|1"}],
    }  # fmt: skip


def test_a_key_that_is_not_there_is_told_at_the_start() -> None:
    with pytest.raises(RuntimeError, match="environment variable 'NO_SUCH_KEY'"):
        Judge(url="http://127.0.0.1:9/v1", api_key_env="NO_SUCH_KEY").setup(Context())


@pytest.mark.parametrize("state", [429, 500, 503])
def test_a_busy_server_is_asked_again(serve: Any, state: int) -> None:
    server = serve(lambda _, nth: (state, {"error": "busy"}, {"Retry-After": "0"}) if nth < 2 else reply("Score: 5"))
    scores, report = ask(Judge(url=server.url), ["a", "b"])
    assert list(scores.values()) == [0.5, 0.5]
    assert not report.failures
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((401, {"error": "no such key"}, {}), "ServerError: the judge's server refuses the request with HTTP 401"),
        ((200, {"choices": []}, {}), "ServerError: the judge's server sent no reply"),
        ((200, b"<html>", {}), "ServerError: the judge's server sent no reply: <html>"),
        (reply(None), "ServerError: the judge's server sent no reply"),
        (reply("I would rather not"), "BadAnswer: the judge's reply holds no verdict: 'I would rather not'"),
    ],
)
def test_what_another_try_cannot_change_costs_its_row_at_once(serve: Any, answer: Answer, error: str) -> None:
    server = serve(lambda question, _: answer if question.endswith("bad") else reply("Score: 5"))
    scores, report = ask(Judge(url=server.url, template="{response}"), ["good", "bad", "good2"])
    assert np.array_equal(list(scores.values()), [0.5, np.nan, 0.5], equal_nan=True)
    (failure,) = report.failures
    assert failure.rows == ("u1_0_0",)
    assert failure.error.startswith(error)
    assert len(server.requests) == 3


def test_a_server_that_is_not_there_fails_after_the_retries() -> None:
    start = time.monotonic()
    scores, report = ask(Judge(url="http://127.0.0.1:9/v1", retries=1), ["a"])
    assert np.isnan(scores["u0_0_0"])
    assert "failed 2 times, the last with ConnectError" in report.failures[0].error
    assert 0.3 < time.monotonic() - start < 5


def test_a_sample_whose_time_ends_between_tries_says_what_failed(serve: Any) -> None:
    server = serve(
        lambda question, _: (500, {"error": "out of memory"}, {}) if "bad" in question else reply("Score: 5")
    )
    node = Judge(url=server.url, template="{response}", retries=9)
    scores, report = ask(node, ["good", "bad"], Context(timeout=1.0))
    assert np.array_equal(list(scores.values()), [0.5, np.nan], equal_nan=True)
    (failure,) = report.failures
    assert failure.error.startswith("TimeoutError: no answer within 1 s; the judge at http://127.0.0.1:")
    assert re.search(r"failed \d times?, the last with HTTP 500: .*out of memory", failure.error)


def test_many_rows_wait_together_and_no_more_than_allowed(serve: Any) -> None:
    def slow(question: str, _: int) -> Answer:
        time.sleep(0.1)
        return reply("Score: 5")

    server = serve(slow)
    start = time.monotonic()
    scores, _ = ask(Judge(url=server.url, concurrency=10), [f"r{index}" for index in range(40)])
    assert len(scores) == 40
    assert time.monotonic() - start < 2.5
    assert 5 < server.most <= 10


def test_in_the_scoring_process_a_silent_server_costs_each_row_its_own_time(serve: Any) -> None:
    def answer(question: str, _: int) -> Answer:
        if question.endswith("slow"):
            time.sleep(3)
        return reply("Score: 5")

    server = serve(answer)
    params = {"url": server.url, "template": "{response}"}
    spec = NodeSetup("judge", find("reward.judge", Path()), params, None, {"response": ("response",)}, {}, (),
                     "unscored", 0.7)  # fmt: skip
    rows = Rows.of("abcdef")
    batch = Batch(rows, {"response": Sample(rows, ["1", "slow", "2", "slow", "3", "slow"])},
                  {"response": FieldType("Sample", "str")})  # fmt: skip
    scorer = Scorer(spec, Context(), can_kill=True)
    try:
        start = time.monotonic()
        with collect() as report:
            reward, info = scorer.score(batch)
        assert time.monotonic() - start < 2.5
    finally:
        scorer.close()
    assert np.allclose(reward.values, [0.5, np.nan, 0.5, np.nan, 0.5, np.nan], equal_nan=True)
    assert list(info)[0] == {"reply": "Score: 5"}  # noqa: RUF015
    assert {failure.error for failure in report.failures} == {"TimeoutError: no answer within 0.7 s"}
    assert [failure.rows for failure in report.failures] == [("b_0_0",), ("d_0_0",), ("f_0_0",)]


FROZEN = Context(models={"judge": ModelSpec(path="arith-tiny")}, model="judge")


def test_a_model_of_the_pipeline_judges_and_failures_cost_their_rows() -> None:
    node = JudgeModel(engine="fake", script={"texts": ["Score: 4"]})
    scores, report = ask(node, ["a", "b"], FROZEN)
    assert scores == pytest.approx({"u0_0_0": 0.4, "u1_0_0": 0.4})
    assert not report.failures
    for text, error in ((None, "the script says that this session fails"), ("hm", "no verdict")):
        scores, report = ask(JudgeModel(engine="fake", script={"texts": [text]}), ["a", "b"], FROZEN)
        assert np.isnan(list(scores.values())).all()
        assert [failure.rows for failure in report.failures] == [("u0_0_0",), ("u1_0_0",)]
        assert error in report.failures[0].error


def test_every_rank_judges_its_own_rows() -> None:
    found: list[str] = []
    for rank in range(3):
        context = Context(models=FROZEN.models, model="judge", rank=rank, num_ranks=3)
        found += ask(JudgeModel(engine="fake"), list("abcde"), context)[0]
    assert sorted(found) == [f"u{index}_0_0" for index in range(5)]


def test_the_transformers_engine_judges() -> None:
    node = JudgeModel(engine="transformers", template="{response}", parse=r"(\d+)", scale="none", max_tokens=4)
    scores, report = ask(node, ["20+30=", "2+3="], FROZEN)
    assert not report.failures
    assert all(score >= 0 for score in scores.values())
    assert ask(node, ["20+30=", "2+3="], FROZEN)[0] == scores


def test_a_question_that_the_judge_cannot_read_costs_its_row() -> None:
    node = JudgeModel(engine="transformers", template="{response}", parse=r"(\d+)", scale="none", max_tokens=4)
    scores, report = ask(node, ["20+30=", "what?", "2" * 80, "2+3="], FROZEN)
    assert [bool(np.isnan(score)) for score in scores.values()] == [False, True, True, False]
    assert sorted(failure.rows for failure in report.failures) == [("u1_0_0",), ("u2_0_0",)]


def test_a_judge_that_is_trained_is_refused() -> None:
    trained = Context(models={"policy": ModelSpec(path="arith-tiny", trainable=True)}, model="policy")
    with pytest.raises(ValueError, match="is trained"):
        JudgeModel(engine="transformers").setup(trained)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"engine": "fake", "engine_options": {"a": 1}}, "engine 'fake' has none"), ({}, "Field required")],
)
def test_options_go_to_vllm_only(settings: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        JudgeModel(**settings)
