"""The node class: ports from hints, and what is refused when the class is made."""

from __future__ import annotations

import pickle
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
from pydantic import Field, ValidationError

from flowrl.batch import Json, Prompt, PromptToken, Sample, Step, Token
from flowrl.errors import NodeDefinitionError
from flowrl.fields import FieldType, Port
from flowrl.node import Node
from flowrl.nodes.reward.length_penalty import LengthPenalty
from flowrl.rows import Rows


class Everything(Node):
    """Every kind of port, under postponed evaluation of hints."""

    scale: float = 1.0

    class Out(NamedTuple):
        a: Sample[float]
        b: Token[bool]
        c: Prompt[Json]

    def run(
        self,
        ids: PromptToken[int],
        limit: Step[int],
        rewards: list[Sample[float]],
        extra: Token[float] | None = None,
        many: list[Sample[str]] | None = None,
    ) -> Out:
        raise NotImplementedError


def test_parameters_of_run_are_reads_and_members_of_out_are_writes() -> None:
    assert dict(Everything.input_ports) == {
        "ids": Port("ids", FieldType("PromptToken", "int")),
        "limit": Port("limit", FieldType("Step", "int")),
        "rewards": Port("rewards", FieldType("Sample", "float"), many=True),
        "extra": Port("extra", FieldType("Token", "float"), optional=True),
        "many": Port("many", FieldType("Sample", "str"), optional=True, many=True),
    }
    assert [str(port) for port in Everything.output_ports.values()] == [
        "a: Sample[float]",
        "b: Token[bool]",
        "c: Prompt[json]",
    ]


def test_fields_are_parameters_checked_strictly_and_frozen() -> None:
    assert Everything(scale=2).scale == 2.0
    for wrong in ({"scale": "2"}, {"scale": True}, {"scale": float("nan")}, {"skale": 1.0}):
        with pytest.raises(ValidationError):
            Everything(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="frozen"):
        Everything().scale = 3.0  # type: ignore[misc]


def test_a_node_works_without_an_engine() -> None:
    rows = Rows.of(["a", "b"])
    out = LengthPenalty(budget=8, scale=1.0).run(
        Sample(rows, [1.0, 1.0]), Token.of(rows, [[True, True], [False]], "bool")
    )
    assert out.shaped_reward.values.tolist() == [0.75, 1.0]


def test_a_subclass_keeps_the_ports_of_its_parent() -> None:
    class Child(LengthPenalty):
        budget: int = 4

    assert Child.input_ports == LengthPenalty.input_ports
    assert Child.output_ports == LengthPenalty.output_ports


def test_needs_switches_optional_ports_by_the_settings() -> None:
    from flowrl.nodes.update.policy import Policy

    without, with_kl = Policy(minibatch=1), Policy(minibatch=1, kl_coef=0.1)
    assert "ref_log_probs" not in without.active_ports()
    assert "ref_log_probs" in with_kl.active_ports()
    assert "old_log_probs" in without.active_ports()
    assert Everything().needs() == {}


def test_a_row_scorer_is_pure_and_writes_samples_that_may_be_missing() -> None:
    assert LengthPenalty.scores_rows()
    assert not Everything.scores_rows()


def test_nodes_of_the_library_can_be_pickled() -> None:
    node = LengthPenalty(budget=8)
    assert pickle.loads(pickle.dumps(node)) == node


def test_a_class_attribute_may_be_set_bare_or_as_class_variable() -> None:
    class Whole(Node):
        scope: ClassVar = "step"
        pure = False

        def run(self, reward: Sample[float]) -> None: ...

    assert (Whole.scope, Whole.pure) == ("step", False)
    assert Whole.model_fields == {}


Make = Callable[[str], type[Node]]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    """The class `N` of a module with this text after the usual imports."""

    def run(body: str) -> type[Node]:
        name = f"made_{request.node.name.replace('[', '_')}"
        module = sys.modules[name] = types.ModuleType(name)
        request.addfinalizer(lambda: sys.modules.pop(name, None) and None)
        head = "from typing import *\nfrom flowrl import *\nimport pydantic\n"
        exec(compile(head + textwrap.dedent(body), name, "exec", dont_inherit=True), module.__dict__)
        found: type[Node] = module.__dict__["N"]
        return found

    return run


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_out_is_found_inside_the_class_with_and_without_postponed_hints(future: str) -> None:
    text = future + textwrap.dedent("""
        from typing import NamedTuple
        from flowrl import Node, Sample
        class N(Node):
            class Out(NamedTuple):
                x: Sample[float]
            def run(self, reward: Sample[float]) -> Out:
                return self.Out(reward)
        """)
    module = sys.modules["made_future"] = types.ModuleType("made_future")
    try:
        exec(compile(text, "made_future", "exec", dont_inherit=True), module.__dict__)
        assert module.__dict__["N"].output_ports["x"].type == FieldType("Sample", "float")
    finally:
        del sys.modules["made_future"]


@pytest.mark.parametrize("name", ["scope", "weights", "cardinality", "pure", "device"])
def test_a_class_attribute_annotated_as_a_field_is_refused(make: Make, name: str) -> None:
    with pytest.raises(
        NodeDefinitionError, match=f"N: '{name}' is a class attribute, not a parameter; write `{name} = "
    ):
        make(f"""
            class N(Node):
                {name}: str = "x"
            """)


@pytest.mark.parametrize("name", ["pool", "reads", "every", "timeout", "copy", "max_staleness", "setup", "model_name"])
def test_a_parameter_with_a_reserved_name_is_refused(make: Make, name: str) -> None:
    with pytest.raises(NodeDefinitionError, match=f"N: parameter '{name}' is an? .*give it another name"):
        make(f"""
            class N(Node):
                {name}: int = 1
            """)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def run(self, x): ...", "'x' has no type hint"),
        ("def run(x: Sample[float]): ...", "N.run must be a plain method"),
        ("def run(): ...", "N.run must be a plain method"),
        ("async def run(self, x: Sample[float]): ...", "N.run must be a plain method"),
        ("scope = 'groups'", "N: scope must be one of 'sample', 'group', 'batch', 'step', not 'groups'"),
        ("weights = 'read'", "N: weights must be one of 'reads', 'updates', 'syncs', 'generates', None, not 'read'"),
        ("def run(self, *x: Sample[float]): ...", r"'\*x' hides what is read"),
        ("def run(self, **x: Sample[float]): ...", r"'\*x' hides what is read"),
        ("def run(self, x: Sample[float], /): ...", "N.run: fields are passed by name; remove the '/'"),
        ("@classmethod\n    def run(cls, x: Sample[float]): ...", "N.run must be a plain method"),
        ("@staticmethod\n    def run(self, x: Sample[float]): ...", "N.run must be a plain method"),
        (
            "class Out(NamedTuple):\n        x: list[Sample[float]]\n    def run(self): ...",
            "'x' is one field .*out list",
        ),
        (
            "class Out(NamedTuple):\n        x: Sample[int] | None\n    def run(self): ...",
            "'x' is one field .*out None",
        ),
        ("def run(self, x: int): ...", "'x' needs a field type such as"),
        ("def run(self, x: Sample): ...", "'x' needs a field type such as"),
        ("def run(self, x: Sample[bytes]): ...", "'x' needs a field type such as"),
        ("def run(self, x: Sample[float] | Token[float]): ...", "'x' needs a field type such as"),
        ("def run(self, x: list[int]): ...", "'x' needs a field type such as"),
        ("def run(self, x: 'Sample[Missing]'): ...", "type hint cannot be resolved"),
        ("class Out(NamedTuple):\n        x: float\n    def run(self): ...", "N.Out: 'x' needs a field type"),
        ("class Out:\n        x: Sample[float]\n    def run(self): ...", "N.Out must be a typing.NamedTuple"),
        ("class Out(NamedTuple):\n        rows: Rows\n    def run(self): ...", "cardinality 'expands' returns Rows"),
        (
            "cardinality = 'expands'\n    class Out(NamedTuple):\n        x: Sample[float]\n    def run(self): ...",
            "'expands'",
        ),
    ],
)
def test_a_hint_that_says_no_field_is_refused(make: Make, body: str, message: str) -> None:
    with pytest.raises(NodeDefinitionError, match=message):
        make(f"class N(Node):\n    {body}\n")


def test_a_name_that_only_the_type_checker_sees_is_refused_with_the_reason(make: Make) -> None:
    with pytest.raises(NodeDefinitionError, match=r"'Elsewhere' is not defined.*only under TYPE_CHECKING"):
        make("""
            if TYPE_CHECKING:
                from somewhere import Elsewhere
            class N(Node):
                def run(self, x: "Sample[Elsewhere]") -> None: ...
            """)


def test_a_name_inside_a_function_is_refused() -> None:
    class Local:
        pass

    with pytest.raises(NodeDefinitionError, match="not inside a function"):

        class Uses(Node):
            def run(self, x: Sample[Local]) -> None: ...


def test_an_axis_is_a_class_with_an_element_type() -> None:
    from flowrl.ports import field_type

    found: Any = field_type(Sample[Json])
    assert found == FieldType("Sample", "json")
    assert field_type(int) is None


@pytest.mark.parametrize("default", ["x", 1.5, 0, None])
def test_a_default_that_its_own_type_refuses_is_refused_when_a_node_is_made(default: Any) -> None:
    class Sized(Node):
        size: int = Field(default, ge=1)

    assert Sized(size=1).size == 1
    with pytest.raises(ValidationError, match="1 validation error"):
        Sized()
