"""vLLM's engine options are known from its source, and wrong ones refused before anything starts."""

import subprocess
import sys

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from flowrl.errors import PipelineError
from flowrl.model import ModelSpec, SettingError
from flowrl.node import Context
from flowrl.nodes._backend.vllm_options import OURS, known_options, refuse_unknown
from flowrl.nodes._backend.vllm_start import default_arguments
from flowrl.pipeline import load


def test_the_names_are_those_that_vllm_takes() -> None:
    assert set(known_options()) == set(AsyncEngineArgs.__dataclass_fields__)
    assert set(OURS) <= set(known_options())


def test_what_flowrl_passes_is_known_to_vllm() -> None:
    context = Context(model="policy", models={"policy": ModelSpec(path="arith-tiny")})
    for device in ("cpu", "cuda:0"):
        assert set(default_arguments(Context(**{**vars(context), "device": device}), 8, 1)) <= set(known_options())


@pytest.mark.parametrize(
    ("options", "fact", "fix"),
    [
        ({"max_model_length": 64}, "no engine option 'max_model_length'", "max_model_len"),
        ({"enforce-eager": True}, "no engine option 'enforce-eager'", "enforce_eager"),
        ({"enforce_eager": "yes"}, "'enforce_eager' is bool, not 'yes'", "enforce_eager: bool"),
        ({"max_num_seqs": True}, "int or null, not True", "max_num_seqs"),
        ({"gpu_memory_utilization": "0.5"}, "is float", "gpu_memory_utilization"),
        ({"seed": 3}, "'seed' is not set here", "run.seed"),
        ({"tensor_parallel_size": 2}, "'tensor_parallel_size' is not set here", "tensor_parallel"),
        ({"logprobs_mode": "raw_logprobs"}, "not set here", "trainer"),
    ],
)
def test_an_option_that_vllm_does_not_take_is_refused_with_what_to_write(
    options: dict[str, object], fact: str, fix: str
) -> None:
    with pytest.raises(SettingError, match=fact) as caught:
        refuse_unknown(options)
    assert fix in caught.value.fix


def test_options_that_vllm_takes_pass() -> None:
    refuse_unknown({"max_num_seqs": None, "gpu_memory_utilization": 1, "hf_overrides": {"a": 1}, "block_size": 32})


def test_check_refuses_an_unknown_option_at_its_place_and_imports_no_vllm() -> None:
    sets = ["nodes.rollout.engine=vllm", "nodes.rollout.engine_options={max_model_length: 64}"]
    with pytest.raises(PipelineError, match="vLLM has no engine option 'max_model_length'"):
        load("grpo_sync", sets).plan()
    code = (
        "import sys; from flowrl.pipeline import load;"
        "load('grpo_sync', ['nodes.rollout.engine=vllm', 'nodes.rollout.engine_options={max_model_len: 64}']).check();"
        "assert not {'vllm', 'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_temperature_that_vllm_refuses_is_refused_before_launch() -> None:
    with pytest.raises(PipelineError, match=r"temperatures up to 2, not at 2\.5"):
        load("grpo_sync", ["nodes.rollout.engine=vllm", "nodes.rollout.temperature=2.5"]).plan()


@pytest.mark.parametrize("setting", ["engine_options={max_model_len: 64}", "tensor_parallel=2"])
def test_settings_of_vllm_are_refused_of_another_engine(setting: str) -> None:
    with pytest.raises(PipelineError, match="engine 'transformers' has no"):
        load("grpo_sync", [f"nodes.rollout.{setting}"]).plan()
