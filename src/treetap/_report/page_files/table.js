// SPDX-License-Identifier: Apache-2.0
// The table: columns that fit, and rows, of which only those in sight are drawn.

// ---- Columns ------------------------------------------------------------------------

const has = (get) =>
  sites.some((site) => {
    const found = get(site);
    return found !== null && found !== undefined && found !== "";
  });
const ofValue = (key) => (site) => {
  const figures = valueOf(site);
  return figures && figures[key] !== undefined ? figures[key] : null;
};
const ofGrad = (key) => (site) => {
  const figures = gradOf(site);
  return figures && figures[key] !== undefined ? figures[key] : null;
};

// The lower `rank`, the longer a column stays when there is little room.
const columns = [
  {
    key: "bad",
    label: "Non-finite",
    width: 108,
    rank: 0,
    left: true,
    get: (s) => (isBad(s) ? troubleCount(s) : null),
    cell: chips,
    quiet: true,
    tip: "Values that are NaN or infinite; ∇ in the gradient",
  },
  {
    key: "type",
    label: "Type",
    width: 148,
    rank: 7,
    left: true,
    get: (s) => s.type,
    cell: typeCell,
    tip: "Shape and type of the value",
  },
  {
    key: "bytes",
    label: "Memory",
    width: 70,
    rank: 9,
    get: (s) => s.bytes || null,
    show: memory,
    tip: "Memory of the value",
  },
  {
    key: "bars",
    label: "Distribution",
    width: 112,
    rank: 1,
    left: true,
    get: (s) => (valueOf(s) || {}).bars,
    cell: (s) => spark(valueOf(s)),
    fixed: true,
  },
  {
    key: "parts",
    label: "Iterations",
    width: 84,
    rank: 6,
    left: true,
    get: (s) => (valueOf(s) || {}).parts,
    cell: (s) => strip(valueOf(s)),
    fixed: true,
    tip: "Standard deviation in each iteration or shard",
  },
  {
    key: "run",
    label: "Over steps",
    width: 84,
    rank: 5,
    left: true,
    get: (s) => (steps.length > 1 && s.values ? 1 : null),
    cell: runCell,
    fixed: true,
    tip: "Standard deviation at each step",
  },
  { key: "mean", label: "Mean", width: 66, rank: 4, get: ofValue("mean") },
  { key: "std", label: "Std", width: 60, rank: 3, get: ofValue("std") },
  {
    key: "max",
    label: "Max |x|",
    width: 62,
    rank: 2,
    get: ofValue("abs_max"),
    tip: "Largest magnitude of the finite values",
  },
  {
    key: "dead",
    label: "Dead",
    width: 52,
    rank: 6.5,
    get: ofValue("dead"),
    show: percent,
    tip: "Share of units (last axis) that are zero everywhere",
  },
  {
    key: "grad",
    label: "Grad norm",
    width: 70,
    rank: 3.5,
    get: ofGrad("norm"),
    tip: "Norm of the gradient",
  },
  {
    key: "ratio",
    label: "Grad / value",
    width: 80,
    rank: 8,
    get: (s) => ratio(s),
    tip: "Norm of the gradient by norm of the value",
  },
];
let shownColumns = [];

function chooseColumns() {
  const gap = window.innerWidth <= 900 ? 10 : 14;
  const narrow = table.clientWidth < 700;
  let room = table.clientWidth - 2 * (narrow ? 16 : 24) - (narrow ? 200 : 280);
  const chosen = new Set();
  for (const column of [...columns]
    .filter((c) => c.used)
    .sort((a, b) => a.rank - b.rank)) {
    room -= column.width + gap;
    if (room < 0) break;
    chosen.add(column);
  }
  shownColumns = columns.filter((column) => chosen.has(column));
  const widths = shownColumns.map((column) => `${column.width}px`).join(" ");
  table.style.setProperty("--columns", `minmax(0, 1fr) ${widths}`);
  table.setAttribute("aria-colcount", shownColumns.length + 1);
  headBox.replaceChildren(
    make("span", { role: "columnheader", class: "left" }, "Site"),
    ...shownColumns.map(headCell),
  );
}

function headCell(column) {
  const sorted = state.sort && state.sort.key === column.key;
  const attributes = {
    role: "columnheader",
    class: column.left ? "left" : null,
    title: column.tip,
    "aria-sort": sorted ? (state.sort.down ? "descending" : "ascending") : null,
  };
  if (column.fixed) return make("span", attributes, column.label);
  const button = make(
    "button",
    { type: "button", tabindex: "-1", onclick: () => sortBy(column.key) },
    column.label,
  );
  return make("span", attributes, button);
}

function sortBy(key) {
  if (!state.sort || state.sort.key !== key) state.sort = { key, down: true };
  else state.sort = state.sort.down ? { key, down: false } : null;
  chooseColumns();
  table.scrollTop = 0;
  update();
}

function troubleCount(site) {
  const of = (f) => (f ? (f.nan || 0) + (f.infinite || 0) + (f.bad ? 1 : 0) : 0);
  return of(valueOf(site)) || of(gradOf(site));
}

function chips(site) {
  const value = valueOf(site),
    grad = gradOf(site),
    isFirst = isFirstBad(site);
  const figures = isWrong(value) ? value : grad;
  const text =
    (figures === value ? "" : "∇ ") + troubles(figures, (x) => compact.format(x));
  const whole = [
    isWrong(value) ? troubles(value) : "",
    isWrong(grad) ? `gradient: ${troubles(grad)}` : "",
  ];
  const name = isFirst ? "chip first" : figures === value ? "chip" : "chip later";
  return make(
    "span",
    { class: name, title: whole.filter(Boolean).join("; ") },
    isFirst ? `first: ${text}` : text,
  );
}

const isFirstBad = (site) =>
  state.step === data.first.step && site.index === data.first.site;

function typeCell(site) {
  const found = /^(\w+)\[([\d,]*)\](.*)$/.exec(site.type);
  if (!found) return make("span", { class: "type" }, site.type || "");
  const shape = found[2].replaceAll(",", "×") || "scalar";
  return make(
    "span",
    { class: "type", title: site.type },
    `${shape} `,
    make(
      "small",
      null,
      found[1]
        .replace("float", "f")
        .replace("bf16", "bf16")
        .replace(/^int/, "i")
        .replace(/^uint/, "u") + found[3],
    ),
  );
}

// ---- Rows ---------------------------------------------------------------------------

let rows = []; // nodes that are to be seen, in order
const ROW = 30;

const isFiltered = () => Boolean(state.matches) || state.onlyBad;

function findRows() {
  const matches = state.matches || (() => true);
  const wanted = (node) =>
    node.site && matches(node.site) && (!state.onlyBad || isBad(node.site));
  for (const node of nodes) node.wanted = wanted(node);
  if (state.sort) return sorted(nodes.filter((node) => node.wanted));
  for (const node of [...nodes].reverse()) {
    node.kept =
      node.wanted || (!isFiltered() && !node.site) || node.children.some((c) => c.kept);
  }
  const found = [];
  let hidden = -1; // the depth below which rows are folded away
  for (const node of nodes) {
    if (hidden >= 0 && node.depth > hidden) continue;
    hidden = -1;
    if (!node.kept) continue;
    found.push(node);
    if (!isFiltered() && state.folded.has(node)) hidden = node.depth;
  }
  return found;
}

function sorted(found) {
  const { key, down } = state.sort;
  const column = columns.find((one) => one.key === key);
  const rank = (node) => {
    const value = column.get(node.site);
    return value === null || value === undefined ? NaN : value;
  };
  const pairs = found.map((node) => [rank(node), node]);
  pairs.sort(([a], [b]) => {
    const isMissing = (x) => (isNumber(x) && isNaN(x) ? 1 : 0);
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
    const order = a < b ? -1 : a > b ? 1 : 0;
    return down ? -order : order;
  });
  return pairs.map(([, node]) => node);
}

// Finds the rows again and draws those in sight.
function update() {
  rows = findRows();
  const isStale =
    !rows.includes(state.cursor) || (isFiltered() && !state.cursor.wanted);
  if (isStale) state.cursor = rows.find((node) => node.wanted) || rows[0] || null;
  rows.forEach((node, place) => {
    node.place = place;
  });
  rowsBox.style.height = `${rows.length * ROW}px`;
  table.setAttribute("aria-rowcount", rows.length + 1);
  byId("empty").hidden = rows.length > 0;
  const count = nodes.filter((node) => node.wanted).length;
  byId("shown").textContent =
    count === sites.length
      ? `${whole(count)} sites`
      : `${whole(count)} of ${whole(sites.length)} sites`;
  render(true);
}

let drawn = [0, 0];

function render(isFresh, all = false) {
  const height = table.clientHeight || 800;
  let from = Math.max(0, Math.floor(table.scrollTop / ROW) - 12);
  let to = Math.min(rows.length, Math.ceil((table.scrollTop + height) / ROW) + 12);
  if (all) [from, to] = [0, rows.length];
  if (!isFresh && from >= drawn[0] && to <= drawn[1]) return;
  drawn = [Math.max(0, from - 8), Math.min(rows.length, to + 8)];
  const made = rows.slice(...drawn).map((node, n) => drawRow(node, drawn[0] + n));
  rowsBox.replaceChildren(...made);
  markCursor();
}

function drawRow(node, place) {
  const site = node.site,
    isFlat = Boolean(state.sort);
  const isFirst = site && isFirstBad(site);
  const folds = !isFlat && node.children.length > 0;
  const isOpen = folds && (!state.folded.has(node) || isFiltered());
  const names = ["row"];
  if (site) names.push("site");
  if (site && isWrong(valueOf(site))) names.push("bad");
  if (isFirst) names.push("first");
  if (site && !node.wanted) names.push("outside");
  if (site && site === state.open) names.push("open");
  const row = make("div", {
    role: "row",
    id: `row-${node.id}`,
    class: names.join(" "),
    "aria-rowindex": place + 2,
    "aria-level": isFlat ? 1 : node.depth + 1,
    "aria-expanded": folds ? String(Boolean(isOpen)) : null,
    "aria-selected": String(Boolean(site && site === state.open)),
    style: `top: ${place * ROW}px`,
  });
  row.node = node;
  row.append(nameCell(node, isFlat, folds, isOpen));
  if (site) for (const column of shownColumns) row.append(dataCell(column, site));
  return row;
}

function nameCell(node, isFlat, folds, isOpen) {
  const site = node.site;
  const cell = make("div", { role: "gridcell", class: "name" });
  cell.style.paddingLeft = isFlat ? "0" : `${node.depth * 16}px`;
  if (!isFlat) {
    const twisty = make("span", { class: "twisty", "aria-hidden": "true" });
    if (folds)
      twisty.append(
        draw(
          "svg",
          { viewBox: "0 0 16 16" },
          draw("path", {
            d: "M6 4l4 4-4 4",
            fill: "none",
            stroke: "currentColor",
            "stroke-width": "1.5",
          }),
        ),
      );
    cell.append(twisty);
  }
  cell.append(
    isFlat
      ? longLabel(site)
      : make(
          "span",
          {
            class: node.isModule ? "label module" : "label tap",
            title: site ? site.text : null,
          },
          node.label,
          node.name ? make("i", null, `:${node.name}`) : null,
        ),
  );
  const below = node.troubles - (site && isBad(site) ? 1 : 0);
  if (below && folds && !isOpen)
    cell.append(
      make("span", { class: "dot", title: `${below} sites below are not finite` }),
    );
  if (!isFlat && node.isModule && site && node.depth + (node.parent ? 1 : 0))
    cell.append(make("span", { class: "kind" }, site.module));
  if (!site)
    cell.append(
      make(
        "span",
        { class: "kind" },
        node.count === 1 ? "1 site" : `${whole(node.count)} sites`,
      ),
    );
  return cell;
}

function longLabel(site) {
  const place = site.path.join("/");
  const label = make("span", { class: "label", title: site.text }, place || site.name);
  if (place) label.append(make("i", null, `:${site.name}${callText(site)}`));
  return label;
}

function dataCell(column, site) {
  const attributes = { role: "gridcell", class: column.left ? "left" : null };
  const value = column.get(site);
  if (value === null || value === undefined || value === "") {
    return make(
      "div",
      { ...attributes, class: `missing${column.left ? " left" : ""}` },
      column.fixed || column.quiet ? "" : "–",
    );
  }
  if (column.cell) return make("div", attributes, column.cell(site));
  if (value === 0) attributes.class = "quiet";
  return make("div", attributes, (column.show || numeral)(value));
}

function markCursor() {
  for (const row of rowsBox.querySelectorAll(".cursor")) row.classList.remove("cursor");
  const row = state.cursor && byId(`row-${state.cursor.id}`);
  if (row) {
    row.classList.add("cursor");
    table.setAttribute("aria-activedescendant", row.id);
  } else table.removeAttribute("aria-activedescendant");
}

function moveTo(node) {
  if (!node) return;
  state.cursor = node;
  const top = node.place * ROW,
    head = headBox.offsetHeight;
  const room = table.clientHeight - head;
  if (top < table.scrollTop) table.scrollTop = top;
  else if (top + ROW > table.scrollTop + room) table.scrollTop = top + ROW - room;
  render(false);
  markCursor();
  if (state.open && node.site && node.site !== state.open) open(node.site);
}

function fold(node, isFolded) {
  if (!node || !node.children.length) return;
  if (isFolded) state.folded.add(node);
  else state.folded.delete(node);
  state.cursor = node;
  update();
}

// Goes to a site wherever it is: nothing may hide it.
function show(site) {
  if (state.matches && !state.matches(site)) setFilter("");
  if (state.onlyBad && !isBad(site)) state.onlyBad = false;
  state.sort = null;
  reveal(site.node);
  chooseColumns();
  update();
  open(site);
  table.scrollTop = Math.max(0, site.node.place * ROW - table.clientHeight / 3);
  moveTo(site.node);
}
