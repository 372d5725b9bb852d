// SPDX-License-Identifier: Apache-2.0
// The header, keys and clicks; and the start of it all.

// ---- Header -------------------------------------------------------------------------

function drawHeader() {
  byId("title").textContent = data.title;
  byId("about").textContent = data.about.join("  ·  ");
  byId("note").textContent = data.notes.join(" ");
  byId("note").hidden = !data.notes.length;
  byId("verdict").replaceChildren(...data.verdicts.map(verdictLine));
  if (steps.length > 1) {
    byId("stepper").hidden = false;
    byId("step").max = steps.length - 1;
    byId("step").value = state.step;
    byId("at").textContent = steps[state.step];
  }
}

function verdictLine(verdict) {
  if (verdict.site === null)
    return make("span", { class: `verdict ${verdict.kind}` }, verdict.text);
  const site = sites[verdict.site];
  const go = (event) => {
    event.preventDefault();
    setStep(verdict.step);
    show(site);
  };
  const where = steps.length > 1 ? ` at step ${steps[verdict.step]}` : "";
  return make(
    "a",
    { class: "verdict bad", href: `#${encodeURIComponent(site.text)}`, onclick: go },
    make(
      "div",
      null,
      verdict.text,
      " ",
      make("code", null, site.text),
      make("span", null, `${where} (${verdict.troubles})`),
    ),
  );
}

function setStep(step) {
  state.step = step;
  byId("step").value = step;
  byId("at").textContent = steps[step];
  refreshTroubles();
  update();
  if (state.open) drawPanel();
}

function refreshTroubles() {
  countTroubles();
  const count = sites.filter(isBad).length;
  badButton.textContent = count
    ? `Non-finite only (${whole(count)})`
    : "Non-finite only";
  badButton.disabled = !count && !state.onlyBad;
}

function setFilter(text) {
  if (filterBox.value !== text) filterBox.value = text;
  try {
    state.matches = parseFilter(text);
    filterBox.removeAttribute("aria-invalid");
    filterBox.title = "";
  } catch (problem) {
    filterBox.setAttribute("aria-invalid", "true");
    filterBox.title = problem.message;
    return;
  }
  table.scrollTop = 0;
  update();
}

function setOnlyBad(is) {
  state.onlyBad = is;
  badButton.setAttribute("aria-pressed", String(is));
  refreshTroubles();
  table.scrollTop = 0;
  update();
}

function setTheme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  drawPanel();
}

function foldAll() {
  const isFolded = state.folded.size > 0;
  state.folded = new Set(
    isFolded ? [] : nodes.filter((node) => node.children.length && node.parent),
  );
  if (!isFolded && !state.folded.size)
    state.folded = new Set(nodes.filter((node) => node.children.length));
  byId("fold").textContent = isFolded ? "Collapse all" : "Expand all";
  update();
}

// ---- Keys and clicks ----------------------------------------------------------------

const keys = {
  ArrowDown: () => moveTo(rows[Math.min(rows.length - 1, state.cursor.place + 1)]),
  ArrowUp: () => moveTo(rows[Math.max(0, state.cursor.place - 1)]),
  Home: () => moveTo(rows[0]),
  End: () => moveTo(rows[rows.length - 1]),
  PageDown: () =>
    moveTo(rows[Math.min(rows.length - 1, state.cursor.place + pageRows())]),
  PageUp: () => moveTo(rows[Math.max(0, state.cursor.place - pageRows())]),
  ArrowRight: () => {
    const node = state.cursor;
    if (state.folded.has(node)) fold(node, false);
    else if (node.children.length) moveTo(rows[node.place + 1]);
  },
  ArrowLeft: () => {
    const node = state.cursor;
    if (node.children.length && !state.folded.has(node) && !state.sort)
      fold(node, true);
    else if (node.parent && rows.includes(node.parent)) moveTo(node.parent);
  },
  Enter: () => {
    const node = state.cursor;
    if (node.site) open(node.site);
    else fold(node, !state.folded.has(node));
  },
  n: () => {
    const wrong = nodes.filter(
      (node) => node.site && isBad(node.site) && (!state.matches || node.wanted),
    );
    if (!wrong.length) return;
    const after = wrong.find((node) => node.id > state.cursor.id) || wrong[0];
    reveal(after);
    update();
    moveTo(after);
  },
};
keys.j = keys.ArrowDown;
keys.k = keys.ArrowUp;
keys[" "] = keys.Enter;

const pageRows = () => Math.max(1, Math.floor(table.clientHeight / ROW) - 2);

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === filterBox) {
    if (event.key === "Escape") {
      if (filterBox.value) setFilter("");
      else table.focus();
    } else if (event.key === "Enter" || event.key === "ArrowDown") table.focus();
    else return;
    return event.preventDefault();
  }
  if (event.key === "Escape" && state.open) {
    event.preventDefault();
    return close();
  }
  if (event.key === "/") {
    event.preventDefault();
    filterBox.focus();
    return filterBox.select();
  }
  if (event.key === "t") return setTheme();
  const isControl = event.target.closest && event.target.closest("button, input, a");
  const action = Object.hasOwn(keys, event.key) ? keys[event.key] : null;
  const isLetter = event.key === "j" || event.key === "k" || event.key === "n";
  if (!action || !state.cursor || (isControl && !isLetter)) return;
  if (panel.contains(event.target) && !isLetter) return;
  event.preventDefault();
  action();
}

function onClick(event) {
  const row = event.target.closest(".row");
  if (!row) return;
  const node = row.node;
  state.cursor = node;
  markCursor();
  if (event.target.closest(".twisty") && node.children.length)
    return fold(node, !state.folded.has(node));
  if (node.site) return open(node.site);
  return fold(node, !state.folded.has(node));
}

function listen() {
  document.addEventListener("keydown", onKey);
  rowsBox.addEventListener("click", onClick);
  table.addEventListener("scroll", () => render(false), { passive: true });
  filterBox.addEventListener("input", () => setFilter(filterBox.value));
  badButton.addEventListener("click", () => setOnlyBad(!state.onlyBad));
  byId("step").addEventListener("input", (event) =>
    setStep(Number(event.target.value)),
  );
  byId("theme").addEventListener("click", setTheme);
  byId("fold").addEventListener("click", foldAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    drawPanel(),
  );
  window.addEventListener("beforeprint", () => render(true, true));
  window.addEventListener("hashchange", followAddress);
  new ResizeObserver(() => {
    chooseColumns();
    render(true);
  }).observe(table);
}

function followAddress() {
  let wanted = "";
  try {
    wanted = decodeURIComponent(location.hash.slice(1));
  } catch {
    return;
  }
  const site = wanted && sites.find((one) => one.text === wanted);
  if (site && site !== state.open) show(site);
}

buildTree();
finishTree();
for (const column of columns)
  column.used = steps.some((_, n) => {
    state.step = n;
    return has(column.get);
  });
state.step = steps.length - 1;
refreshTroubles();
drawHeader();
if (data.first.site !== null) reveal(sites[data.first.site].node);
byId("fold").textContent = state.folded.size ? "Expand all" : "Collapse all";
byId("fold").hidden = !nodes.some((node) => node.children.length);
chooseColumns();
update();
listen();
followAddress();
