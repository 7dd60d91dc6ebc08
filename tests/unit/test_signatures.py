"""Arguments of classes are read from their source, without importing it."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.signatures import Signature, UnknownClass, signature_of


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that raises when it is imported."""
    folder = tmp_path / "never_imported"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_class_is_found_through_the_modules_that_hand_it_on(package: Path) -> None:
    (package / "first.py").write_text("try:\n    from .second import Inner as Outer\nexcept ImportError:\n    pass\n")
    (package / "second").mkdir()
    (package / "second" / "__init__.py").write_text(
        "from .third import *\nfrom ..fourth import Base\nclass Inner(Base): ...\n"
    )
    (package / "fourth.py").write_text("class Base:\n    def __init__(self, params, lr=1, *, depth=2, **more): ...\n")
    found = Signature(("params", "lr", "depth"), takes_any=True, root="Base", required={"__init__": ("params",)})
    assert signature_of("never_imported.first:Outer") == found


def test_methods_are_those_of_the_nearest_class_and_the_root_of_a_base_elsewhere_is_open(package: Path) -> None:
    (package / "own.py").write_text(
        "import far\n"
        "class Base(far.Thing):\n"
        "    def __init__(self, params, /, lr, *, depth, width=1): ...\n"
        "    def step(self, closure): ...\n"
        "class Mine(Base):\n"
        "    def step(self, closure=None): ...\n"
    )
    found = signature_of("never_imported.own:Mine")
    assert found is not None
    assert found.root is None
    assert found.required == {"step": (), "__init__": ("params", "lr", "depth")}


@pytest.mark.parametrize(
    "text",
    [
        "Mine = make()",
        "from somewhere import *",
        "def __getattr__(name): ...",
        "def Mine(params): ...",
        "class Mine(make()): ...",
        "class Mine:",
        "from never_imported.odd import Mine",
    ],
)
def test_what_only_an_import_would_tell_is_left_open(text: str, package: Path) -> None:
    (package / "odd.py").write_text(f"{text}\n")
    assert signature_of("never_imported.odd:Mine") is None


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("never_imported.odd:Mine", "module 'never_imported.odd' has no class 'Mine'"),
        ("never_imported.old:Mine", "there is no module 'never_imported.old'"),
        ("never_imported.odd.er:Mine", "there is no module 'never_imported.odd.er'"),
        ("no_such_package:Mine", "there is no module 'no_such_package'"),
    ],
)
def test_what_is_not_there_is_said(name: str, fact: str, package: Path) -> None:
    (package / "odd.py").write_text("class Mind: ...\n")
    with pytest.raises(UnknownClass, match=fact) as caught:
        signature_of(name)
    assert str(caught.value) == fact
    assert caught.value.fix


def test_torch_is_not_imported_for_its_optimizers() -> None:
    code = (
        "import sys; from flowrl.signatures import signature_of as s; "
        "names = s('torch.optim:SGD').names; sys.exit('torch' in sys.modules or 'momentum' not in names)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
