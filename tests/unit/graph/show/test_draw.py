"""Drawings: the same boxes and arrows in every form, whatever nodes and fields are called."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_nodes import document

from flowrl import Pipeline
from flowrl.graph.plan import Plan
from flowrl.graph.show import draw
from flowrl.graph.show.draw import as_dot, as_mermaid, as_picture_data, as_svg, as_tree
from flowrl.graph.show.picture import PictureError, picture, plain
from flowrl.pipeline import VIEWS, load

settings.register_profile("drawings", settings.get_profile("flowrl"), max_examples=40)
SLOW = settings.get_profile("drawings")
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")

WORDS = ["end", "graph", "subgraph", "class", "style", "click", "default", "o", "x", "a-b", "a--b", "a---", "_-_", "LR"]
TEXTS = [
    'q"uote',
    "`code`",
    "<b>bold</b>",
    "a&lt;b",
    "%%{init: {}}%%",
    "|bar|",
    "[x](y)",
    "#35;",
    "\\n",
    "back\\",
    "]]",
]
names = st.one_of(st.sampled_from(WORDS), st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True))
texts = st.one_of(st.sampled_from(TEXTS), st.text(min_size=1, max_size=12))


def chain(nodes: dict[str, str]) -> Plan:
    """Each node reads what the one before wrote: a mapping from node to field."""
    made: dict[str, Any] = {}
    before = None
    for name, field in nodes.items():
        reads = {"use": "Mix", "reads": {"inputs": [before]}} if before else {"use": "Source"}
        made[name] = {**reads, "writes": {"value": field}}
        before = field
    return Pipeline(document(made)).plan()


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Legal names of nodes, and fields of any name."""
    columns = {"prompt", "answer", "data_source"}
    found = draw(st.lists(names.filter(lambda name: name != "data"), min_size=1, max_size=6, unique=True))
    size = len(found)
    fields = draw(st.lists(texts.filter(lambda t: t not in columns), min_size=size, max_size=size, unique=True))
    return chain(dict(zip(found, fields, strict=True)))


CODE = "from flowrl import Node, Sample\nclass Mine(Node):\n    def run(self, reward: Sample[float]) -> None: ...\n"


@pytest.mark.parametrize("view", [view for view in VIEWS if view not in ("svg", "resolved")])
@pytest.mark.parametrize("where", ["mine.py", "below/mine.py", "../mine.py"])
def test_a_file_of_nodes_is_shown_alike_on_every_machine(tmp_path: Path, view: str, where: str) -> None:
    shown = []
    for folder in (tmp_path / "here" / "rl", tmp_path / "home" / "somebody" / "rl"):
        folder.mkdir(parents=True)
        (folder / where).parent.mkdir(exist_ok=True)
        (folder / where).write_text(CODE)
        use = where if where.startswith("..") else f"./{where}"
        (folder / "p.yaml").write_text(f"extends: grpo_sync\nname: p\nnodes: {{mine: {{use: '{use}:Mine'}}}}\n")
        shown.append(load(folder / "p.yaml").draw(view))
    assert shown[0] == shown[1]
    assert f"{use}:Mine" in shown[0].replace("#58;", ":")
    assert str(tmp_path) not in shown[0]


def test_a_file_far_away_is_shown_in_full(tmp_path: Path) -> None:
    far = tmp_path / "mine.py"
    far.write_text(CODE)
    below = tmp_path / "/".join("abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz")
    below.mkdir(parents=True)
    (below / "p.yaml").write_text(f"extends: grpo_sync\nname: p\nnodes: {{mine: {{use: '{far}:Mine'}}}}\n")
    assert f"[{far}:Mine]" in load(below / "p.yaml").draw("tree")


MERMAID_BOX = re.compile(r'^ +(n\.[\w.]+)(?:\["([^"\[\]`]*)"\](?::::pool\d)?|\[\("([^"\[\]`]*)"\)\])$')
MERMAID_ARROW = re.compile(r'^  (n\.[\w.]+) (?:-->|-\.->|==>|--x)\|"([^"|`]*)"\| (n\.[\w.]+)$')
MERMAID_OTHER = re.compile(
    r"flowchart LR|  subgraph step_\d+\[\"step \d+\"\]|    direction LR|  end|  classDef \w+ [\w:,#]+"
)


@SLOW
@given(plans(), st.one_of(st.none(), st.integers(1, 3)))
def test_mermaid_sees_every_box_and_arrow_and_nothing_that_it_could_misread(plan: Plan, unroll: int | None) -> None:
    lines = as_mermaid(plan, unroll).split("\n")
    boxes = [match[1] for line in lines if (match := MERMAID_BOX.match(line))]
    arrows = [(match[1], match[3]) for line in lines if (match := MERMAID_ARROW.match(line))]
    others = [line for line in lines if not MERMAID_BOX.match(line) and not MERMAID_ARROW.match(line)]
    assert [line for line in others if not MERMAID_OTHER.fullmatch(line)] == []
    shown = picture(plan, unroll)
    assert len(set(boxes)) == len(boxes) == len(shown.boxes)
    ids = dict(zip((box.key for box in shown.boxes), boxes, strict=True))
    assert Counter(arrows) == Counter((ids[arrow.source], ids[arrow.target]) for arrow in shown.arrows)


@needs_dot
@settings(SLOW, max_examples=15)
@given(plans(), st.one_of(st.none(), st.integers(1, 2)))
def test_graphviz_reads_every_box_arrow_and_label(plan: Plan, unroll: int | None) -> None:
    done = subprocess.run(["dot", "-Tjson0"], input=as_dot(plan, unroll), capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    read = json.loads(done.stdout)
    objects = read["objects"]
    shown = picture(plan, unroll)
    assert {one["name"] for one in objects if "nodes" not in one} == {box.key for box in shown.boxes}
    drawn = Counter((objects[one["tail"]]["name"], objects[one["head"]]["name"]) for one in read.get("edges", ()))
    assert drawn == Counter((arrow.source, arrow.target) for arrow in shown.arrows)


@needs_dot
@settings(SLOW, max_examples=10)
@given(plans())
def test_the_svg_shows_every_name_as_it_is(plan: Plan) -> None:
    shown = ElementTree.fromstring(as_svg(plan)).iter("{http://www.w3.org/2000/svg}text")
    words = {(text.text or "").replace("\xa0", " ") for text in shown}
    assert set(plan.graph.nodes) <= words
    assert {plain(label).strip() for arrow in picture(plan).arrows for label in arrow.labels} <= {
        w.strip() for w in words
    }


def test_without_graphviz_the_message_names_what_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PictureError, match=r"`dot` is not installed.*--as mermaid and --as html need nothing"):
        as_svg(chain({"a": "b"}))


@needs_dot
def test_graphviz_may_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "SVG_TIMEOUT", 0.0)
    with pytest.raises(PictureError, match="--as html draws large graphs"):
        as_svg(chain({"a": "b"}))


@SLOW
@given(plans(), st.one_of(st.none(), st.integers(1, 3)))
def test_a_tree_without_color_has_no_control_character(plan: Plan, unroll: int | None) -> None:
    text = as_tree(plan, unroll=unroll)
    assert all(line.isprintable() for line in text.split("\n"))
    bare = re.sub("\x1b\\[[0-9;]*m", "", as_tree(plan, color=True, unroll=unroll))
    assert bare == f"{text}\npools: ■ cpu"
    named = re.findall(r"^[│ ]*[├└]─ ([\w-]+(?:@\d+)?)  \[", text, re.MULTILINE)
    assert Counter(named) == Counter(box.key for box in picture(plan, unroll).boxes if box.pool)


def test_colors_go_by_pool() -> None:
    models, on = {"policy": {"path": "x"}}, {"use": "Read", "model": "policy"}
    nodes = {
        "rollout": {"use": "Rollout", "model": "policy", "pool": "one"},
        "first": {**on, "pool": "one", "writes": {"log_probs": "a"}},
        "second": {**on, "pool": "two", "writes": {"log_probs": "b"}},
    }
    text = as_tree(Pipeline(document(nodes, models=models, pools={"one": {}, "two": {}})).plan(), color=True)
    by_name = {name: color for color, name in re.findall("\x1b\\[1;(\\d+)m(?:■ )?(\\w+)\x1b\\[0m", text)}
    assert by_name["first"] == by_name["rollout"] == by_name["one"] != by_name["second"] == by_name["two"]


@SLOW
@given(plans(), st.one_of(st.none(), st.integers(1, 3)))
def test_the_picture_as_data_is_plain_and_whole(plan: Plan, unroll: int | None) -> None:
    data = as_picture_data(plan, unroll)
    shown = picture(plan, unroll)
    assert json.loads(json.dumps(data)) == data
    assert [box["key"] for box in data["boxes"]] == [box.key for box in shown.boxes]
    assert [(arrow["source"], arrow["target"]) for arrow in data["arrows"]] == [
        (arrow.source, arrow.target) for arrow in shown.arrows
    ]
