"""What users bring along: their own data, models, nodes and rewards, without a change to flowrl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import DEFAULT, ROOT, Finished

SHORT = (
    "--steps",
    "2",
    "--set",
    "tracking=null",
    "--set",
    "batch.prompts=4",
    "--set",
    "nodes.actor_update.minibatch=2",
)

NODE = (ROOT / "examples" / "custom_node" / "my_nodes.py").read_text()


def test_a_users_jsonl_of_prompts_and_answers(tmp_path: Path, flowrl: Callable[..., Finished]) -> None:
    rows = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = flowrl("run", DEFAULT, *SHORT, "--local", "--set", "data.train={type: jsonl, path: sums.jsonl}")
    assert run.code == 0, run.out + run.err
    assert len(run.metrics) == 2
    rows_seen = {row.split("_")[0] for event in run.events if event["node"] == "rollout" for row in event["rows"]}
    assert rows_seen <= {f"u{number}" for number in range(12)}


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_another_causal_model_folder(kind: str, tmp_path: Path, flowrl: Callable[..., Finished]) -> None:
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "nodes" / "assets" / "arith-tiny")
    torch.manual_seed(0)
    special = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(
            **special, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        ))  # fmt: skip
    else:
        model = GPT2LMHeadModel(
            GPT2Config(**special, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=None)
        )
    model.save_pretrained(tmp_path / kind)
    tokenizer.save_pretrained(tmp_path / kind)
    run = flowrl("run", DEFAULT, *SHORT, "--set", f"params.base=./{kind}", "--set", "nodes.weight_sync.verify=true")
    assert run.code == 0, run.out + run.err
    assert run.metrics[0]["mismatch/log_ratio"] < 1e-4
    assert run.metrics[1]["actor/grad_norm"] > 0


def test_a_node_of_fifteen_lines_with_renamed_ports(tmp_path: Path, flowrl: Callable[..., Finished]) -> None:
    (tmp_path / "my_nodes.py").write_text(NODE)
    (tmp_path / "mine.yaml").write_text(
        f"extends: {DEFAULT}\nname: mine\nnodes:\n"
        "  reward: {writes: {reward: raw_reward}}\n"
        "  shape: {use: './my_nodes.py:LengthPenalty', budget: 8, reads: {reward: raw_reward},\n"
        "          writes: {shaped_reward: reward}}\n"
    )
    run = flowrl("run", "mine.yaml", *SHORT)
    assert run.code == 0, run.out + run.err
    (event, *_) = [event for event in run.events if event["node"] == "shape"]
    assert event["reads"] == ["raw_reward", "response_mask"]
    assert event["writes"] == ["reward"]
    assert run.metrics[0]["reward/mean"] < 1


def test_a_second_reward_and_their_weighted_sum(tmp_path: Path, flowrl: Callable[..., Finished]) -> None:
    (tmp_path / "two.yaml").write_text(
        f"extends: {DEFAULT}\nname: two\nnodes:\n"
        "  reward: {writes: {reward: reward_exact}}\n"
        "  loose: {use: reward.exact_match, ignore_case: true, writes: {reward: reward_loose}}\n"
        "  total: {use: reward.weighted_sum, coefficients: [0.5, 0.5],\n"
        "          reads: {rewards: [reward_exact, reward_loose]}}\n"
    )
    one = flowrl("run", DEFAULT, *SHORT, "--set", "run.dir=runs/one/runs")
    both = flowrl("run", "two.yaml", *SHORT, "--set", "run.dir=runs")
    assert both.code == 0, both.out + both.err
    assert one.code == 0
    rewards = [
        json.loads(path.read_text().splitlines()[0])["reward/mean"] for path in sorted(tmp_path.rglob("metrics.jsonl"))
    ]
    assert len(rewards) == 2
    assert rewards[0] == pytest.approx(rewards[1])


def test_the_python_interface_runs_the_same_document(tmp_path: Path) -> None:
    import flowrl

    sets = [*(value for value in SHORT[2:] if value != "--set"), f"run.dir={tmp_path}", "run.steps=2"]
    result = flowrl.load(DEFAULT, sets).run(local=True, quiet=True)
    assert [len(result.metrics), result.folder.parent] == [2, tmp_path]
    assert result.metrics[0]["rollout/tokens"] > 0
