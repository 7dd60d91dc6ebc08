"""Node classes by library name, import path and file; in this process and in another."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flowrl.nodes.reward.exact_match import ExactMatch
from flowrl.registry import BrokenNode, NodeRef, UnknownNode, find, library_names

MINE = """
from __future__ import annotations
from typing import NamedTuple
from flowrl import Node, Sample

class Mine(Node):
    '''Adds something.'''
    amount: float = 1.0

    class Out(NamedTuple):
        shaped: Sample[float]

    def run(self, reward: Sample[float]) -> Out:
        return self.Out(reward + self.amount)
"""


def write(folder: Path, text: str, name: str = "my_nodes.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def test_a_library_name_gives_its_module() -> None:
    assert find("reward.exact_match", Path()).load() is ExactMatch


def test_every_library_name_loads() -> None:
    names = library_names()
    assert "advantage.grpo" in names
    assert not any("_backend" in name or "__init__" in name for name in names)
    for name in names:
        assert find(name, Path()).load().__module__ == f"flowrl.nodes.{name}"


def test_an_import_path_gives_the_class() -> None:
    assert find("flowrl.nodes.reward.exact_match:ExactMatch", Path()).load() is ExactMatch


def test_a_file_is_found_from_the_folder_of_the_pipeline(tmp_path: Path) -> None:
    write(tmp_path, MINE)
    ref = find("./my_nodes.py:Mine", tmp_path)
    cls = ref.load()
    assert cls.__name__ == "Mine"
    assert cls is find("./my_nodes.py:Mine", tmp_path).load()


def test_a_changed_file_is_another_module(tmp_path: Path) -> None:
    write(tmp_path, MINE)
    before = find("my_nodes.py:Mine", tmp_path).load()
    write(tmp_path, MINE.replace("1.0", "2.0"))
    after = find("my_nodes.py:Mine", tmp_path).load()
    assert (before().amount, after().amount) == (1.0, 2.0)  # type: ignore[attr-defined]


def test_a_reference_alone_makes_the_class_in_another_process_without_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINE)
    blob = pickle.dumps(find("./my_nodes.py:Mine", tmp_path))
    path.unlink()
    script = """
        import pickle, sys
        from flowrl import Rows, Sample
        node = pickle.load(sys.stdin.buffer).load()(amount=2.0)
        print(node.run(Sample(Rows.of(["a"]), [1.0])).shaped.values.tolist(), type(node).__module__)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], input=blob, capture_output=True, cwd=tmp_path
    )
    assert done.stdout.decode().startswith("[3.0] flowrl_file_my_nodes_"), done.stderr.decode()


def test_a_traceback_shows_the_source_of_a_file_that_is_gone(tmp_path: Path) -> None:
    import traceback

    path = write(tmp_path, MINE.replace("self.Out(reward + self.amount)", "nothing  # here"))
    ref = find("./my_nodes.py:Mine", tmp_path)
    path.unlink()
    with pytest.raises(NameError) as caught:
        ref.load()().run(None)  # type: ignore[attr-defined]
    assert "nothing  # here" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("reward.exact_mach", "no library node is called 'reward.exact_mach'; did you mean 'reward.exact_match'?"),
        ("reward", "no library node is called 'reward'"),
        ("_backend.models", "no library node is called"),
        (".__init__", "no library node is called"),
        ("reward.__init__", "no library node is called"),
        ("./my_node.py:Mine", r"cannot read the file './my_node.py': No such file.*did you mean 'my_nodes.py'\?"),
        ("./empty.py:Mine", "'.*empty.py' has no class 'Mine'"),
        ("./my_nodes.py:Mien", r"has no class 'Mien'; did you mean 'Mine'\?"),
        ("no_such_package.nodes:Mine", "no module named 'no_such_package'"),
        ("flowrl.nodes.reward.exact_match:ExactMatsch", r"did you mean 'ExactMatch'\?"),
        ("./my_nodes.py", r"'./my_nodes.py' names a file and no class .*: write ./my_nodes.py:Mine; .* classes: Mine$"),
        ("./my_nodes.py:", "its node classes: Mine$"),
        ("./empty.py", "write ./empty.py:Class; it has no node class$"),
        ("./my_node.py", r"cannot read the file './my_node.py': No such file.*did you mean 'my_nodes.py'\?"),
        ("./empty.py:Mine", "it has no node class$"),
        ("./no\0where.py:Mine", "cannot read the file .*: embedded null byte"),
        (":", "':' names no class: write a library name, my_pkg.nodes:Class or ./my_nodes.py:Class"),
        (":Mine", "':Mine' names no class"),
        ("my_nodes:", "'my_nodes:' names no class"),
        ("./my_nodes:Mine", "'./my_nodes' is neither a module, such as my_pkg.nodes, nor a file, such as"),
        ("..my_nodes:Mine", "'..my_nodes' is neither a module"),
        ("my nodes:Mine", "'my nodes' is neither a module"),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest_name(tmp_path: Path, use: str, message: str) -> None:
    write(tmp_path, MINE)
    write(tmp_path, "", "empty.py")
    with pytest.raises(UnknownNode, match=message):
        find(use, tmp_path).load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", "importing .*my_nodes.py failed: No module named 'no_such_module'"),
        ("1 / 0\n", "importing .*my_nodes.py, line 1, failed: ZeroDivisionError: division by zero"),
        ("def broken(:\n", "importing .*my_nodes.py failed: SyntaxError"),
        ("raise SystemExit(2)\n", "importing .*my_nodes.py, line 1, failed: SystemExit: 2"),
        ("Mine = 3\n", "'Mine' in .*my_nodes.py is no flowrl.Node"),
        ("from flowrl import Node\nclass Mine(Node):\n    pass\n", "my_nodes.py:2: Mine has no `run`"),
        (
            "from flowrl import Node\n\nclass Mine(Node):\n    def run(self, x): ...\n",
            "^/.*/my_nodes.py:3: Mine.run: 'x' has no type hint",
        ),
        ("from flowrl import Node\nclass Mine(Node):\n    class Out: pass\n", "my_nodes.py:2: Mine.Out must be"),
        (
            "from flowrl import Node\nclass Mine(Node):\n    scope = 'row'\n",
            "py:2: Mine: scope must be one of",
        ),
        (
            "from flowrl import Node\nclass Mine(Node):\n    size = 1\n",
            "py, line 2, failed: PydanticUserError",
        ),
        (
            "from flowrl import Node\nclass Mine(Node):\n    size: 'Missing' = 1\n    def run(self): ...\n",
            "my_nodes.py:2: Mine: the type 'Missing' of a parameter does not exist at the top of the module",
        ),
        (
            "from flowrl import Node\nclass Mine(Node):\n    size: 'Odd'\n    def run(self): ...\nclass Odd: ...\n",
            "my_nodes.py:2: Mine: Unable to generate pydantic-core schema",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_told_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(BrokenNode, match=message):
        find("my_nodes.py:Mine", tmp_path).load()
    with pytest.raises(BrokenNode, match=message):  # a module that failed is not half there the second time
        find("my_nodes.py:Mine", tmp_path).load()


def test_a_file_without_a_class_whose_classes_cannot_be_listed_says_why(tmp_path: Path) -> None:
    write(tmp_path, "1 / 0\n")
    with pytest.raises(BrokenNode, match=r"my_nodes\.py, line 1, failed: ZeroDivisionError"):
        find("./my_nodes.py", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from flowrl import Node\nclass Mine(Node):\n    class Out: pass\n", "^{file}:2: Mine.Out must be"),
        ("def bad():\n    1 / 0\nbad()\n", "^importing {module}, line 2 of {file}, failed: ZeroDivisionError"),
        ("import json\njson.loads('')\n", "^importing {module}, line 2 of {file}, failed: JSONDecodeError"),
    ],
)
def test_a_broken_class_of_a_module_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    module = f"broken_{abs(hash(text))}"
    path = write(tmp_path, text, f"{module}.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BrokenNode, match=message.format(module=module, file=path)):
        find(f"{module}:Mine", tmp_path).load()


def test_a_type_defined_further_down_is_found(tmp_path: Path) -> None:
    text = """
        from __future__ import annotations
        from flowrl import Node, Sample
        class Mine(Node):
            mode: Mode = "fast"
            def run(self, reward: Sample[float]) -> None: ...
        from typing import Literal
        Mode = Literal["fast", "slow"]
        """
    write(tmp_path, text)
    assert find("my_nodes.py:Mine", tmp_path).load()(mode="slow").model_dump() == {"mode": "slow"}


def test_a_reference_is_small_and_equal_to_its_copy() -> None:
    ref = find("reward.exact_match", Path())
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert ref == NodeRef("reward.exact_match", "flowrl.nodes.reward.exact_match", "ExactMatch")


def test_a_class_behind_a_dot_is_told_to_stand_behind_a_colon() -> None:
    with pytest.raises(UnknownNode, match=r"did you mean 'email\.mime\.text:MIMEText'\?"):
        find("email.mime.text.MIMEText", Path())
    with pytest.raises(UnknownNode, match=r"did you mean 'reward\.exact_match'\?"):
        find("reward.exact_mtach", Path())
