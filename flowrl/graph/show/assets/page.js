"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const svg = document.getElementById("picture");
  const view = document.getElementById("view");
  const panel = document.getElementById("panel");
  const input = document.querySelector("#search input");
  const found = document.getElementById("found");

  // What is drawn. A key is the name of a node, with its step where steps are unrolled: `rollout@2`.
  const nodes = new Map(); // key -> element
  const fields = new Map(); // key/field -> element
  const edges = [...view.querySelectorAll(".edge")].map((el) => ({ el, ...el.dataset }));
  const touching = new Map(); // key -> edges
  for (const el of view.querySelectorAll(".node")) nodes.set(el.dataset.key, el);
  for (const el of view.querySelectorAll(".field")) fields.set(`${el.dataset.key}/${el.dataset.field}`, el);
  for (const edge of edges) {
    for (const key of [edge.from, edge.to]) {
      if (!touching.has(key)) touching.set(key, []);
      touching.get(key).push(edge);
    }
  }
  const all = [...nodes.values(), ...fields.values(), ...edges.map((edge) => edge.el)];
  if (edges.length <= 4000) {
    for (const { el } of edges) {
      const hit = el.firstElementChild.cloneNode(); // a wide, unseen line for the pointer
      hit.setAttribute("class", "hit");
      el.append(hit);
    }
  }
  const edgeOf = new Map(edges.map((edge) => [edge.el, edge]));

  const nameOf = (key) => key.split("@")[0];
  const stepOf = (key) => (key.includes("@") ? "@" + key.split("@")[1] : "");

  // ---- light -------------------------------------------------------------------------------------------------------
  let hovered = null; // {key} or {key, field} or {edge}
  let chosen = null; // {key} or {key, field}

  const ofField = (key, field) => (touching.get(key) || []).filter((edge) => edge.from === key && edge.field === field);

  function lightsOf(what) {
    if (what.edge && what.edge.field === undefined) {
      return [what.edge.el, nodes.get(what.edge.from), nodes.get(what.edge.to)];
    }
    const key = what.edge ? what.edge.from : what.key;
    const field = what.edge ? what.edge.field : what.field;
    const lit = [nodes.get(key)];
    if (field !== undefined) {
      lit.push(fields.get(`${key}/${field}`));
      for (const edge of ofField(key, field)) lit.push(edge.el, nodes.get(edge.to));
      return lit;
    }
    for (const edge of touching.get(key) || []) {
      lit.push(edge.el, nodes.get(edge.from), nodes.get(edge.to), fields.get(`${edge.from}/${edge.field}`));
    }
    for (const [, name] of data.nodes[nameOf(key)].writes) lit.push(fields.get(`${key}/${name}`));
    return lit;
  }

  function matches(query) {
    const rank = (name) => (name === query ? 0 : name.startsWith(query) ? 1 : 2);
    const hits = [];
    for (const [key, el] of nodes) {
      const { use, reads, writes } = data.nodes[nameOf(key)];
      const name = nameOf(key).toLowerCase();
      const ports = [...reads, ...writes].filter(([port, field]) => port !== field).map(([port]) => port); // renamed
      if (name.includes(query)) hits.push({ key, el, rank: rank(name) });
      else if ([use, ...ports].some((text) => text.toLowerCase().includes(query))) hits.push({ key, el, rank: 3 });
    }
    for (const el of fields.values()) {
      const name = el.dataset.field.toLowerCase();
      if (name.includes(query)) hits.push({ key: el.dataset.key, field: el.dataset.field, el, rank: rank(name) });
    }
    return hits.sort((a, b) => a.rank - b.rank);
  }

  let hits = [];
  let current = -1;

  function light() {
    const query = input.value.trim();
    const focus = hovered || (query ? null : chosen);
    const lit = new Set(focus ? lightsOf(focus) : hits.map((hit) => hit.el));
    const active = focus !== null || query !== "";
    svg.classList.toggle("searched", focus === null && query !== "");
    for (const el of all) {
      el.classList.toggle("lit", active && lit.has(el));
      el.classList.toggle("dim", active && !lit.has(el));
    }
  }

  function search() {
    const query = input.value.trim().toLowerCase();
    hits = query ? matches(query) : [];
    current = -1;
    found.textContent = query ? `${hits.length || "no"} match${hits.length === 1 ? "" : "es"}` : "";
    light();
  }

  input.addEventListener("input", search);
  document.getElementById("search").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!hits.length) return;
    current = (current + 1) % hits.length;
    center(hits[current].el, 1);
  });

  // ---- view --------------------------------------------------------------------------------------------------------
  const at = { x: 0, y: 0, scale: 1 };
  const size = { width: Number(view.dataset.width), height: Number(view.dataset.height) };

  function move() {
    view.setAttribute("transform", `translate(${at.x} ${at.y}) scale(${at.scale})`);
    svg.classList.toggle("far", at.scale < 0.3);
  }

  const FOOT = 52; // legend and buttons lie below

  function whole() {
    const box = svg.getBoundingClientRect();
    return Math.max(Math.min(box.width / size.width, (box.height - FOOT) / size.height, 1.4), 0.001);
  }

  function fit() {
    const box = svg.getBoundingClientRect();
    at.scale = whole();
    at.x = (box.width - size.width * at.scale) / 2;
    at.y = (box.height - FOOT - size.height * at.scale) / 2;
    move();
  }

  function zoom(factor, x, y) {
    const box = svg.getBoundingClientRect();
    const [px, py] = [x ?? box.width / 2, y ?? box.height / 2];
    const scale = Math.min(Math.max(at.scale * factor, Math.min(whole(), 0.1)), 6);
    at.x = px - ((px - at.x) * scale) / at.scale;
    at.y = py - ((py - at.y) * scale) / at.scale;
    at.scale = scale;
    move();
  }

  function center(el, least) {
    const box = svg.getBoundingClientRect();
    at.scale = Math.max(at.scale, least);
    move();
    const part = el.getBoundingClientRect();
    at.x += box.left + box.width / 2 - (part.left + part.width / 2);
    at.y += box.top + box.height / 2 - (part.top + part.height / 2);
    move();
  }

  function reveal(el) {
    const [box, part] = [svg.getBoundingClientRect(), el.getBoundingClientRect()];
    const into = (low, high, from, to) => (from < low ? low - from : to > high ? high - to : 0);
    at.x += into(box.left + 20, box.right - 20, part.left, part.right);
    at.y += into(box.top + 20, box.bottom - 60, part.top, part.bottom);
    move();
  }

  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    const lines = event.deltaMode === 1 ? 16 : 1;
    zoom(Math.exp(-event.deltaY * lines * 0.0015), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });

  let drag = null;
  let moved = false;
  svg.addEventListener("pointerdown", (event) => {
    moved = false;
    if (event.button === 0) drag = { x: event.clientX, y: event.clientY, atX: at.x, atY: at.y };
  });
  svg.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!moved && Math.hypot(dx, dy) < 4) return;
    if (!moved) svg.setPointerCapture(event.pointerId);
    moved = true;
    svg.classList.add("dragged");
    [at.x, at.y] = [drag.atX + dx, drag.atY + dy];
    move();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    svg.addEventListener(name, () => {
      drag = null;
      svg.classList.remove("dragged");
    });
  }
  const zooms = { in: () => zoom(1.25), out: () => zoom(0.8), fit };
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", zooms[button.dataset.zoom]);
  }

  // ---- pointer and keyboard ----------------------------------------------------------------------------------------
  function under(target) {
    const el = target.closest?.("#view .node, #view .field, #view .edge");
    if (!el) return null;
    return edgeOf.has(el) ? { edge: edgeOf.get(el) } : { key: el.dataset.key, field: el.dataset.field };
  }

  function hover(what) {
    hovered = what;
    light();
  }

  const same = (a, b) => a?.key === b?.key && a?.field === b?.field && a?.edge === b?.edge;
  svg.addEventListener("pointerover", (event) => {
    const what = drag && moved ? hovered : under(event.target);
    if (!same(what, hovered)) hover(what);
  });
  svg.addEventListener("pointerleave", () => hovered && hover(null));
  view.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && hover(under(event.target)));
  view.addEventListener("focusout", () => hover(null));

  svg.addEventListener("click", (event) => {
    if (moved) return;
    const what = under(event.target);
    if (what && what.key) choose(what);
    else if (what && what.edge.field !== undefined) choose({ key: what.edge.from, field: what.edge.field });
    else if (!what) choose(null);
  });

  function clear() {
    input.value = "";
    hovered = null;
    choose(null);
    search();
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      clear();
      document.activeElement?.blur();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === input) return;
    const by = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (["Enter", " "].includes(event.key) && view.contains(event.target)) choose(under(event.target));
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit();
    else if (event.key === "/") input.focus();
    else if (by && !panel.contains(event.target)) {
      at.x += by[0];
      at.y += by[1];
      move();
    } else return;
    event.preventDefault();
  });

  // ---- panel -------------------------------------------------------------------------------------------------------
  function make(tag, attributes, ...children) {
    const el = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
    el.append(...children.filter((child) => child !== null));
    return el;
  }

  function link(what, text) {
    const el = make("button", { type: "button", class: "link", "data-goto": what.field ?? what.key }, text);
    el.addEventListener("click", () => choose(what));
    return el;
  }

  const nodeLink = (name, step) => {
    const key = nodes.has(name + step) ? name + step : [...nodes.keys()].find((one) => nameOf(one) === name);
    return key === undefined ? name : link({ key }, key);
  };

  function separated(links) {
    return links.flatMap((one, index) => (index ? [", ", one] : [one]));
  }

  function section(title, name, items) {
    const list = items.length ? make("ul", {}, ...items) : make("small", {}, "nothing");
    return make("section", { "data-section": name }, make("h3", {}, title), list);
  }

  function fieldLine(port, name, step, ends) {
    const field = data.fields[name];
    const writer = data.fields[name].writer + step;
    const title = port === name ? [] : [make("code", {}, `${port} `), ends === "writer" ? "← " : "→ "];
    const others = ends === "writer" ? [field.writer] : field.readers;
    const words = ends === "writer" ? "written by " : others.length ? "read by " : "read by nobody";
    return make("li", {}, ...title, link({ key: writer, field: name }, name),
      make("small", {}, `${field.type}, shape ${field.shape}`),
      make("small", {}, words, ...separated(others.map((other) => nodeLink(other, step)))));
  }

  function nodePanel(key) {
    const [node, step] = [data.nodes[nameOf(key)], stepOf(key)];
    const facts = Object.entries(node.facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
    const parameters = node.parameters.map(([name, value, set, meaning]) => make("li", {},
      make("div", { class: "parameter", "data-parameter": name }, make("code", {}, name), make("code", {}, value),
        make("span", { class: set ? "origin set" : "origin" }, set ? "set" : "default")),
      meaning ? make("small", {}, meaning) : null));
    const order = (touching.get(key) || []).filter((edge) => edge.order).map((edge) => make("li", {},
      edge.to === key ? "waits for " : "before ", link({ key: edge.to === key ? edge.from : edge.to },
        edge.to === key ? edge.from : edge.to), make("small", {}, edge.order)));
    return [make("h2", {}, key), make("div", { class: "sub" }, node.use), make("p", { class: "doc" }, node.doc),
      make("dl", {}, ...facts), section("Parameters", "parameters", parameters),
      section("Reads", "reads", node.reads.map(([port, name]) => fieldLine(port, name, step, "writer"))),
      section("Writes", "writes", node.writes.map(([port, name]) => fieldLine(port, name, step, "readers"))),
      ...(order.length ? [section("Order", "order", order)] : [])];
  }

  function fieldPanel(key, name) {
    const [field, step] = [data.fields[name], stepOf(key)];
    const readers = field.readers.map((reader) => make("li", {}, nodeLink(reader, step)));
    return [make("h2", {}, name), make("div", { class: "sub" }, `field of type ${field.type}`),
      make("dl", {}, make("dt", {}, "shape"), make("dd", {}, field.shape)),
      section("Written by", "writer", [make("li", {}, nodeLink(field.writer, step))]),
      section("Read by", "readers", readers)];
  }

  function choose(what) {
    for (const el of view.querySelectorAll(".chosen")) el.classList.remove("chosen");
    chosen = what;
    panel.hidden = what === null;
    document.querySelector("main").classList.toggle("opened", what !== null);
    if (what !== null) {
      const close = make("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
      close.addEventListener("click", () => choose(null));
      panel.replaceChildren(close, ...(what.field === undefined ? nodePanel(what.key) : fieldPanel(what.key, what.field)));
      panel.scrollTop = 0;
      const el = what.field === undefined ? nodes.get(what.key) : fields.get(`${what.key}/${what.field}`);
      el.classList.add("chosen");
      reveal(el);
    }
    light();
  }

  window.addEventListener("resize", () => (chosen ? null : fit()));
  fit();
})();
