"""Finding and loading models: the message says what is wrong and what to do."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from flowrl.model import ModelSpec
from flowrl.model_files import ASSETS, ModelError
from flowrl.node import Context
from flowrl.nodes._backend.models import folder_of, frozen_model, load_model, load_tokenizer, resolve
from flowrl.nodes._backend.trainer import Trainer


def test_a_name_is_the_shipped_model_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve("arith-tiny") == str(ASSETS / "arith-tiny")
    assert resolve(str(tmp_path)) == str(tmp_path)


def test_a_path_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no folder .*missing.*a shipped name such as arith-tiny"):
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


def test_a_model_is_loaded_without_dropout() -> None:
    assert not any(module.training for module in load_model(ModelSpec(path="arith-tiny")).modules())


# The hub.


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, path in (("ENDPOINT", ""), ("HUGGINGFACE_CO_URL_TEMPLATE", "/{repo_id}/resolve/{revision}/{filename}")):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", f"http://127.0.0.1:{port}{path}")


@pytest.fixture
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens."""
    use_hub(monkeypatch, 9)


@pytest.mark.parametrize("status", [200, 401, 404])
def test_what_a_hub_that_answers_has_is_left_to_it(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use_hub(monkeypatch, server.server_port)
        assert folder_of(ModelSpec(path=f"owner/model-{status}", revision="v1")) == f"owner/model-{status}"
        assert folder_of(ModelSpec(path=f"owner/model-{status}", revision="v1")) == f"owner/model-{status}"
        server.shutdown()
    assert asked == [f"/owner/model-{status}/resolve/v1/config.json"], "asked once, whoever asks"


@pytest.mark.usefixtures("_no_hub")
@pytest.mark.parametrize("load", [load_model, load_tokenizer, folder_of])
def test_a_hub_that_does_not_answer_is_asked_once_and_says_what_to_do(load: Callable[[ModelSpec], Any]) -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"neither shipped nor a folder.*path of a local folder"):
        load(ModelSpec(path="nobody/nothing-at-all"))
    assert time.monotonic() - start < 8


@pytest.mark.usefixtures("_no_hub")
def test_what_the_hub_gave_before_is_found_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--cached"
    for revision in ("a" * 40, "b" * 40):
        shutil.copytree(ASSETS / "arith-tiny", repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "refs" / "v2").write_text("b" * 40)
    assert folder_of(ModelSpec(path="me/cached")) == str(repository / "snapshots" / ("a" * 40))
    assert folder_of(ModelSpec(path="me/cached", revision="v2")) == str(repository / "snapshots" / ("b" * 40))
    assert load_model(ModelSpec(path="me/cached")).num_parameters() == 661_632
    assert load_tokenizer(ModelSpec(path="me/cached")).eos_token_id is not None
    with pytest.raises(ModelError, match="neither shipped nor a folder"):
        folder_of(ModelSpec(path="me/cached", revision="v3"))


def test_a_user_who_is_offline_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="offline mode is enabled"):
        load_tokenizer(ModelSpec(path="nobody/nothing-else"))


# Every setting reaches who loads.


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_is_what_was_asked_for_in_every_user_of_a_model(name: str) -> None:
    spec = ModelSpec(path="arith-tiny", trainable=True, attn_implementation=name)
    context = Context(models={"policy": spec}, model="policy")
    for model in (load_model(spec), Trainer(context).module, frozen_model(context)):
        assert model.config._attn_implementation == name  # type: ignore[union-attr]


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """A model with code of its own, which notes that it was run."""
    shutil.copytree(ASSETS / "arith-tiny", tmp_path, dirs_exist_ok=True)
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'was_run')!r}).touch()\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_code_of_a_model_runs_only_if_it_is_trusted(own_code: Path, load: Callable[[ModelSpec], Any]) -> None:
    with pytest.raises(ModelError, match=r"needs Python files that come with it.*`trust_remote_code: true`"):
        load_model(ModelSpec(path=str(own_code)))
    assert not (own_code / "was_run").exists()
    load(ModelSpec(path=str(own_code), trust_remote_code=True))
    assert type(load_model(ModelSpec(path=str(own_code), trust_remote_code=True))).__name__ == "MyModel"
    assert (own_code / "was_run").exists()


def test_a_chat_template_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "1+2="}]
    (tmp_path / "chat.jinja").write_text("<{{ messages[0]['content'] }}>")
    for template in ("<{{ messages[0]['content'] }}>", str(tmp_path / "chat.jinja")):
        tokenizer = load_tokenizer(ModelSpec(path="arith-tiny", chat_template=template))
        assert tokenizer.apply_chat_template(turn, tokenize=False) == "<1+2=>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "broken in line 1"),
        ("{{ messages[7]['content'] }}", "cannot present a user's turn"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ 'hello' }}", "leaves out what the user says"),
        ("missing.jinja", "cannot read the chat template"),
    ],
)
def test_a_chat_template_that_does_not_work_fails_at_load(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(ModelSpec(path="arith-tiny", chat_template=template))


def test_the_tokenizer_of_another_model_must_fit(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    own = load_tokenizer(ModelSpec(path="arith-tiny"))
    folder = model_folder("qwen2")
    own.save_pretrained(tmp_path)
    assert load_tokenizer(ModelSpec(path=str(folder), tokenizer=str(tmp_path))).get_vocab() == own.get_vocab()
    own.add_tokens(["<more>"])
    own.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has 21 words, the model .* knows 20"):
        load_tokenizer(ModelSpec(path=str(folder), tokenizer=str(tmp_path)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no tokenizer_config\.json"):
        load_tokenizer(ModelSpec(path=str(folder), tokenizer=str(tmp_path / "empty")))
