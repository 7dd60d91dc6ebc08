"""The page in a real browser: what lights up, what the panel says, what the search finds, and that nothing is fetched.

`pytest tests/end_to_end/test_page.py --update-golden` also takes the picture of the docs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_nodes import document

from flowrl import Pipeline
from flowrl.graph.show.page import as_html
from flowrl.pipeline import load

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

ROOT = Path(__file__).parents[2]
PIPELINE = ROOT / "pipelines" / "grpo_sync.yaml"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ASYNC = (
    "schedule={mode: separate_async, max_staleness: 2, updates_per_sync: 2}",
    "pools.generate={shares: null, workers: 1}",
)
HOSTILE = '</script><img src=x onerror="boom()"> \' " & {{data}}'


class Opened:
    """A page with everything that it asked for and complained of."""

    def __init__(self, browser: Any, file: Path, html: str) -> None:
        file.write_text(html, encoding="utf-8")
        self.url = file.as_uri()
        self.page = browser.new_page(viewport={"width": 1600, "height": 800})
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(self.url)

    def at_rest(self) -> Any:
        """The page as when it was opened."""
        self.page.mouse.move(3, 795)
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("0")
        return self.page

    def lit(self, selector: str) -> set[str]:
        """What the lit elements are called."""
        names = "all => all.map(e => e.dataset.field ?? e.dataset.key)"
        return set(self.page.eval_on_selector_all(f"#view {selector}.lit", names))

    def dim(self, selector: str) -> set[str]:
        """What the dimmed elements are called."""
        names = "all => all.map(e => e.dataset.field ?? e.dataset.key)"
        return set(self.page.eval_on_selector_all(f"#view {selector}.dim", names))

    def edges(self) -> set[tuple[str, str]]:
        """Both ends of the lit edges."""
        ends = "all => all.map(e => [e.dataset.from, e.dataset.to])"
        return {tuple(pair) for pair in self.page.eval_on_selector_all("#view .edge.lit", ends)}

    def part(self, name: str) -> str:
        """Text of a section of the panel."""
        text: str = self.page.inner_text(f'#panel [data-section="{name}"]')
        return text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(browser, tmp_path_factory.mktemp("page") / "page.html", as_html(load(PIPELINE).plan()))


@pytest.fixture(scope="module")
def unrolled(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    plan = load(PIPELINE, ASYNC).plan()
    return Opened(browser, tmp_path_factory.mktemp("page") / "unrolled.html", as_html(plan, 4))


def test_all_nodes_and_fields_are_there(opened: Opened) -> None:
    page, plan = opened.at_rest(), load(PIPELINE).plan()
    drawn = page.eval_on_selector_all("#view .node", "all => all.map(e => e.dataset.node)")
    assert sorted(drawn) == sorted(["data", *plan.graph.nodes])
    drawn = page.eval_on_selector_all("#view .field", "all => all.map(e => e.dataset.field)")
    assert sorted(drawn) == sorted(plan.graph.fields)
    assert page.locator("#view .edge").count() == len(plan.graph.edges)
    assert "256 trajectories a step" in page.inner_text("header")
    assert page.locator("#view .lit, #view .dim").count() == 0


@pytest.mark.parametrize("which", ["opened", "unrolled"])
def test_no_two_texts_lie_on_each_other(request: pytest.FixtureRequest, which: str) -> None:
    page = request.getfixturevalue(which).at_rest()
    boxes = page.eval_on_selector_all(
        "#view text",
        "all => all.map(e => [e.textContent, e.getBoundingClientRect()])"
        ".map(([text, box]) => [text, box.x, box.y, box.right, box.bottom])",
    )
    overlaps = [
        (one[0], two[0])
        for number, one in enumerate(boxes)
        for two in boxes[:number]
        if one[1] < two[3] and two[1] < one[3] and one[2] + 2 < two[4] and two[2] + 2 < one[4]
    ]
    assert overlaps == []


@pytest.mark.parametrize("field", ["reward", "temperature", "answer", "num_turns"])
def test_hovering_a_field_lights_its_writer_and_its_readers(opened: Opened, field: str) -> None:
    page, known = opened.at_rest(), load(PIPELINE).plan().graph.fields[field]
    page.hover(f'.field[data-field="{field}"]')
    assert opened.lit(".node") == {known.writer, *known.readers}
    assert opened.lit(".field") == {field}
    assert opened.edges() == {(known.writer, reader) for reader in known.readers}
    assert opened.dim(".node") == {"data", *load(PIPELINE).plan().graph.nodes} - {known.writer, *known.readers}
    page.mouse.move(3, 795)
    assert page.locator("#view .lit, #view .dim").count() == 0


def test_hovering_an_edge_lights_what_it_carries(opened: Opened) -> None:
    page = opened.at_rest()
    page.locator('.edge[data-from="reward"][data-to="advantage"] .hit').dispatch_event("pointerover")
    assert opened.lit(".node") == {"reward", "advantage"}
    assert opened.lit(".field") == {"reward"}
    page.locator("#view .edge-carried .hit").dispatch_event("pointerover")
    assert opened.lit(".node") == {"weight_sync", "rollout"}
    assert opened.edges() == {("weight_sync", "rollout")}


def test_hovering_a_node_lights_its_neighbors(opened: Opened) -> None:
    page = opened.at_rest()
    page.hover('.node[data-node="reward"]')
    assert opened.lit(".node") == {"data", "rollout", "reward", "advantage"}
    assert opened.lit(".field") == {"answer", "response", "reward"}


def test_clicking_a_node_shows_everything_about_it(opened: Opened) -> None:
    page = opened.at_rest()
    page.click('.node[data-node="actor_update"]')
    panel = page.inner_text("#panel")
    for text in ("actor_update", "update.policy", "Take one optimizer step for each mini-batch", "policy", "updates"):
        assert text in panel
    assert page.inner_text('[data-parameter="minibatch"]').split() == ["minibatch", "16", "set"]
    assert page.inner_text('[data-parameter="epochs"]').split() == ["epochs", "1", "default"]
    assert "Passes over the batch." in opened.part("parameters")
    assert "Token[float], shape (256, tokens)" in opened.part("reads")
    assert "written by advantage" in opened.part("reads")
    assert "nothing" in opened.part("writes")
    assert "waits for old_logprob\nweights of policy" in opened.part("order")
    page.click('#panel [data-section="reads"] [data-goto="old_logprob"]')
    assert page.inner_text("#panel h2") == "old_logprob"
    assert "log_probs → old_log_probs" in opened.part("writes")
    assert "read by actor_update" in opened.part("writes")
    page.keyboard.press("Escape")
    assert not page.is_visible("#panel")


def test_a_long_value_leaves_the_names_of_parameters_whole(opened: Opened) -> None:
    page = opened.at_rest()
    page.click('.node[data-node="rollout"]')
    boxes = page.eval_on_selector_all(
        "#panel .parameter",
        "all => all.map(e => [...e.children].map(c => [c.textContent, c.getClientRects().length, "
        "c.getBoundingClientRect().height, c.getBoundingClientRect().right, e.getBoundingClientRect().right]))",
    )
    assert max(len(value[0]) for _, value, _ in boxes) > 50
    for name, _, origin in boxes:
        assert name[2] < 24 and origin[2] < 24, "one line"
        assert origin[3] <= origin[4] + 1, "within the panel"


def test_clicking_a_field_shows_its_type_writer_and_readers(opened: Opened) -> None:
    page = opened.at_rest()
    page.click('.field[data-field="response_mask"]')
    assert "Token[bool]" in page.inner_text("#panel")
    assert "(256, tokens)" in page.inner_text("#panel")
    assert "rollout" in opened.part("writer")
    page.click('#panel [data-section="readers"] [data-goto="advantage"]')
    assert page.inner_text("#panel h2") == "advantage"


def test_the_data_set_is_a_box_too(opened: Opened) -> None:
    page = opened.at_rest()
    page.click('.node[data-node="data"]')
    assert page.inner_text('[data-parameter="size"]').split() == ["size", "4096", "set"]
    assert "read by rollout" in opened.part("writes")


def test_searching_lights_what_matches_and_enter_goes_there(opened: Opened) -> None:
    page = opened.at_rest()
    page.keyboard.press("/")
    page.keyboard.type("LOG_pro")
    assert opened.lit(".node") == {"old_logprob", "ref_logprob"}, "their output of this name is written elsewhere"
    assert opened.lit(".field") == {"old_log_probs", "ref_log_probs", "rollout_log_probs"}
    assert page.inner_text("#found") == "5 matches"
    page.fill("#search input", "rollout.gen")
    assert opened.lit(".node") == {"rollout"}
    assert opened.lit(".field") == set()
    page.fill("#search input", "reward")
    assert opened.lit(".node") == {"reward"} == opened.lit(".field")
    page.keyboard.press("Enter")
    box = page.locator('.node[data-node="reward"]').bounding_box()
    view = page.locator("#picture").bounding_box()
    assert abs(box["x"] + box["width"] / 2 - view["x"] - view["width"] / 2) < 4
    assert abs(box["y"] + box["height"] / 2 - view["y"] - view["height"] / 2) < 4
    page.fill("#search input", "no such thing")
    assert page.inner_text("#found") == "no matches"
    page.keyboard.press("Escape")
    assert page.input_value("#search input") == ""
    assert page.locator("#view .lit, #view .dim").count() == 0


def test_zoom_and_pan_move_the_picture(opened: Opened) -> None:
    page = opened.at_rest()

    def width() -> float:
        return float(page.locator('.node[data-node="rollout"]').bounding_box()["width"])

    def left() -> float:
        return float(page.locator('.node[data-node="rollout"]').bounding_box()["x"])

    fitted = width()
    for grow, shrink in (("+", "-"), ("=", "-")):
        page.keyboard.press(grow)
        assert width() > fitted * 1.2
        page.keyboard.press(shrink)
        assert width() == pytest.approx(fitted, rel=1e-3)
    page.click('[data-zoom="in"]')
    page.click('[data-zoom="in"]')
    assert width() > fitted * 1.5
    page.click('[data-zoom="fit"]')
    assert width() == pytest.approx(fitted, rel=1e-3)
    page.mouse.move(800, 150)
    page.mouse.wheel(0, -300)
    page.wait_for_function("([was]) => document.querySelector('.node').getBoundingClientRect().width > was", arg=[1])
    assert width() > fitted * 1.2
    page.keyboard.press("0")
    before = left()
    page.mouse.move(800, 120)
    page.mouse.down()
    page.mouse.move(880, 150, steps=4)
    page.mouse.up()
    assert left() == pytest.approx(before + 80, abs=1)
    assert not page.is_visible("#panel")
    page.keyboard.press("ArrowLeft")
    assert left() == pytest.approx(before + 140, abs=1)


def test_every_box_can_be_reached_by_keyboard(opened: Opened) -> None:
    page = opened.at_rest()
    assert page.locator("#view .node:not([tabindex='0'][role='button'][aria-label])").count() == 0
    page.focus('.node[data-node="advantage"]')
    page.keyboard.press("Enter")
    assert page.inner_text("#panel h2") == "advantage"
    page.focus('.field[data-field="loss_mask"]')
    page.keyboard.press("Space")
    assert page.inner_text("#panel h2") == "loss_mask"


def test_unrolled_steps_are_bands_with_carried_edges(unrolled: Opened) -> None:
    page = unrolled.at_rest()
    assert page.locator(".band").count() == 4
    assert page.locator("#view .edge-carried").count() == 1
    page.locator("#view .edge-carried .hit").dispatch_event("pointerover")
    assert unrolled.lit(".node") == {"weight_sync@1", "rollout@4"}
    page.hover('.field[data-field="reward"][data-key="reward@2"]')
    assert unrolled.lit(".node") == {"reward@2", "advantage@2"}
    assert "weights of policy, slack 2" in page.inner_html("#view")
    assert "to step 5: weight_sync@2 -&gt; rollout@5, slack 2" in page.inner_html("#view")
    page.click('.node[data-key="actor_update@3"]')
    assert "x2 a step" in page.inner_text("#panel")
    page.click('#panel [data-section="order"] [data-goto="weight_sync@3"]')
    assert page.inner_text("#panel h2") == "weight_sync@3"


def test_nothing_that_users_write_can_break_out(browser: Any, tmp_path: Path) -> None:
    nodes = {
        "source": {"use": "Source", "writes": {"value": HOSTILE}, "tags": [HOSTILE]},
        "judge": {"use": "Judge", "bad": HOSTILE},
        "rollout": {"use": "Rollout", "model": "policy", "pool": "gpu", "lost": HOSTILE},
    }
    plan = Pipeline(document(nodes, models={"policy": {"path": "x"}}, pools={"gpu": {}})).plan()
    opened = Opened(browser, tmp_path / "hostile.html", as_html(plan))
    page = opened.page
    page.click('.node[data-node="judge"]')
    assert HOSTILE in page.inner_text('[data-parameter="bad"]').replace('\\"', '"')
    page.click('.node[data-node="source"]')
    assert HOSTILE in opened.part("writes")
    page.locator("#view .field", has_text="</script>").click()
    assert page.inner_text("#panel h2") == HOSTILE
    assert page.locator("img").count() == 0
    assert opened.complaints == []
    assert opened.requests == [opened.url]


def test_hovering_what_a_gate_keeps_lights_whom_it_holds_back(browser: Any, tmp_path: Path) -> None:
    on = {"model": "policy", "pool": "gpu"}
    nodes = {
        "rollout": {"use": "Rollout", **on},
        "score": {"use": "Judge"},
        "gate": {"use": "Gate", "gate": "keep"},
        "old": {"use": "Read", **on},
    }
    plan = Pipeline(document(nodes, models={"policy": {"path": "x"}}, pools={"gpu": {}})).plan()
    opened = Opened(browser, tmp_path / "gate.html", as_html(plan))
    opened.page.hover('.field[data-field="keep"]')
    assert opened.lit(".node") == {"gate", "old"}
    opened.page.click('.node[data-node="old"]')
    assert "waits for gate\ngate keep" in opened.part("order")
    opened.at_rest().click('.field[data-field="keep"]')
    assert opened.part("readers").endswith("the gate")
    opened.at_rest().click('.node[data-node="gate"]')
    assert "keep: runs again with what it depends on until 4 groups are kept" in opened.page.inner_text("#panel")
    assert "read by the gate" in opened.part("writes")
    assert opened.complaints == []


def test_a_thousand_nodes_open_at_once(browser: Any, tmp_path: Path) -> None:
    nodes: dict[str, Any] = {}
    for number in range(1000):
        sources = sorted({number * 7 % 100 + number // 100 * 100 - 100, number - 100}) if number >= 100 else []
        reads = {"use": "Mix", "reads": {"inputs": [f"f{one}" for one in sources]}} if sources else {"use": "Source"}
        nodes[f"n{number}"] = {**reads, "writes": {"value": f"f{number}"}}
    opened = Opened(browser, tmp_path / "large.html", as_html(Pipeline(document(nodes)).plan()))
    assert opened.page.locator(".node").count() == 1001
    opened.page.fill("#search input", "n777")
    assert opened.lit(".node") == {"n777"}
    assert opened.complaints == []


def test_the_picture_of_the_docs_is_small(opened: Opened, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    page = opened.at_rest()
    page.set_viewport_size({"width": 1760, "height": 720})
    page.click('.node[data-node="advantage"]')
    page.keyboard.press("0")
    page.mouse.move(3, 715)
    update = request.config.getoption("--update-golden")
    path = ROOT / "docs" / "images" / "grpo_sync_page.png" if update else tmp_path / "page.png"
    path.parent.mkdir(exist_ok=True)
    page.screenshot(path=path)
    assert 50_000 < path.stat().st_size < 300_000


def test_nothing_was_fetched_and_nothing_went_wrong(opened: Opened, unrolled: Opened) -> None:
    for one in (opened, unrolled):
        assert one.requests == [one.url]
        assert one.complaints == []
