"""Finding and loading models: the message says what is wrong and what to do."""

from pathlib import Path

import pytest

from flowrl.model import ModelSpec
from flowrl.nodes._backend.models import ASSETS, ModelError, load_model, load_tokenizer, resolve


def test_a_name_is_the_shipped_model_a_folder_or_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve("arith-tiny") == str(ASSETS / "arith-tiny")
    assert resolve(str(tmp_path)) == str(tmp_path)
    assert resolve("owner/model-1b") == "owner/model-1b"


def test_a_path_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder.*shipped: arith-tiny"):
        resolve(str(tmp_path / "missing"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(ModelSpec(path=str(tmp_path)))


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="'vit', which is no causal language model"):
        load_model(ModelSpec(path=str(tmp_path)))


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(ModelSpec(path=str(tmp_path)))


def test_weights_that_lack_a_parameter_are_not_filled_with_chance(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = load_model(ModelSpec(path="arith-tiny"))
    model.config.save_pretrained(tmp_path)
    state = {name: value for name, value in model.state_dict().items() if name != "model.norm.weight"}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 parameters, the first is 'model\.norm\.weight'"):
        load_model(ModelSpec(path=str(tmp_path)))


def test_a_hub_that_does_not_answer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"neither shipped nor a folder.*path of a local folder"):
        load_tokenizer("nobody/nothing-at-all")


def test_a_model_is_loaded_without_dropout() -> None:
    assert not any(module.training for module in load_model(ModelSpec(path="arith-tiny")).modules())
