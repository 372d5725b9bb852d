// SPDX-License-Identifier: Apache-2.0
// The panel: everything about one site.

function sectionOf(title, note, ...children) {
  return make(
    "section",
    null,
    make("div", { class: "title" }, make("h3", null, title), make("span", null, note)),
    ...children,
  );
}

function open(site) {
  state.open = site;
  panel.hidden = !site;
  drawPanel();
  chooseColumns();
  render(true);
  remember(site ? site.text : "");
}

function remember(text) {
  try {
    history.replaceState(
      null,
      "",
      text ? `#${encodeURIComponent(text)}` : location.pathname + location.search,
    );
  } catch {
    /* a frame without an address of its own */
  }
}

function drawPanel() {
  const site = state.open;
  if (!site) return panel.replaceChildren();
  panel.setAttribute("aria-label", `Site ${site.text}`);
  const value = valueOf(site),
    grad = gradOf(site);
  const width = panel.clientWidth - (window.innerWidth <= 900 ? 32 : 48);
  const pictures = pictureSection(site);
  panel.replaceChildren(
    ...[
      panelTop(site),
      panelFacts(site),
      alarm(value, grad),
      isWrong(value) ? pictures : null, // where it is not finite is what one looks for
      histogramSection("Distribution", value, "", width, true),
      histogramSection("Gradient", grad, "second", width, false),
      isWrong(value) ? null : pictures,
      partsSection(site, value, grad, width),
      stepsSection(site, width),
      numbersSection(site, value, grad),
    ].filter(Boolean),
  );
  panel.scrollTop = 0;
}

function panelTop(site) {
  const place = site.path.join("/");
  const heading = make(
    "h2",
    null,
    place ? make("i", null, `${place}:`) : null,
    site.name + callText(site),
  );
  const go = (by) => () => moveTo(neighbour(site, by));
  return make(
    "div",
    { class: "top" },
    heading,
    make(
      "button",
      {
        class: "plain",
        type: "button",
        "aria-label": "Previous site",
        title: "Previous (k)",
        onclick: go(-1),
      },
      "↑",
    ),
    make(
      "button",
      {
        class: "plain",
        type: "button",
        "aria-label": "Next site",
        title: "Next (j)",
        onclick: go(1),
      },
      "↓",
    ),
    make(
      "button",
      {
        class: "plain close",
        type: "button",
        "aria-label": "Close",
        title: "Close (Esc)",
        onclick: () => close(),
      },
      "✕",
    ),
  );
}

function neighbour(site, by) {
  const start = rows.indexOf(site.node);
  for (let n = start + by; n >= 0 && n < rows.length; n += by)
    if (rows[n].site) return rows[n];
  return null;
}

function panelFacts(site) {
  const facts = [
    site.module,
    site.type,
    site.bytes ? memory(site.bytes) : null,
    site.how === "output" ? "method output" : site.how,
    site.kind,
    site.under.length ? `under ${site.under.join(", ")}` : null,
    site.note,
  ];
  return make(
    "p",
    { class: "facts" },
    ...facts.filter(Boolean).map((fact) => make("span", null, fact)),
  );
}

function alarm(value, grad) {
  if (!isWrong(value) && !isWrong(grad)) return null;
  const lines = [];
  const line = (figures, what) => {
    if (!isWrong(figures)) return;
    const among = figures.count
      ? make("span", null, ` of ${whole(figures.count)} ${what}`)
      : ` in ${what}`;
    lines.push(make("div", null, troubles(figures), among));
  };
  line(value, "values");
  line(grad, "gradients");
  return make("div", { class: "alarm" }, ...lines);
}

function histogramSection(title, figures, kind, width, hasSwitch) {
  if (!figures || !figures.bars) return null;
  const rest = [
    figures.bars.log ? "magnitudes" : "",
    steps.length > 1 ? `step ${steps[state.step]}` : "",
  ]
    .filter(Boolean)
    .join(" · ");
  const found = sectionOf(title, rest),
    note = found.querySelector("span");
  found.append(
    histogram(figures, kind, width, (text) => {
      note.textContent = text === null ? rest : text;
    }),
  );
  if (hasSwitch) {
    const box = make("input", {
      type: "checkbox",
      onchange: () => {
        state.log = box.checked;
        const at = panel.scrollTop;
        drawPanel();
        panel.scrollTop = at;
      },
    });
    box.checked = state.log;
    found.querySelector(".title").append(make("label", null, box, "log counts"));
  }
  return found;
}

function partsSection(site, value, grad, width) {
  const parts = value && value.parts,
    gradParts = grad && grad.parts;
  const any = parts || gradParts;
  if (!any) return null;
  const count = any.count,
    labels = Array.from({ length: count }, (_, n) => String(n));
  const none = labels.map(() => null),
    wrong = (p) => (p && p.bad) || none;
  const band =
    parts && bandChart((key) => parts[key] || none, wrong(parts), labels, width);
  const small = [
    parts && smallChart("Norm", parts.norm || none, wrong(parts), labels, numeral, ""),
    parts &&
      smallChart("Dead units", parts.dead || none, wrong(parts), labels, percent, ""),
    gradParts &&
      smallChart(
        "Gradient norm",
        gradParts.norm || none,
        wrong(gradParts),
        labels,
        numeral,
        "second",
      ),
  ].filter(Boolean);
  return sectionOf(
    "By iteration",
    `${count} ${site.under.includes("scan") ? "iterations" : "parts"}`,
    ...(band || []),
    small.length ? make("div", { class: "small-charts" }, ...small) : null,
  );
}

function stepsSection(site, width) {
  if (steps.length < 2) return null;
  const labels = steps.map(String);
  const of = (get) => (key) =>
    steps.map((_, n) => {
      const f = get(site, n);
      return f && isNumber(f[key]) ? f[key] : null;
    });
  const wrong = (get) => steps.map((_, n) => isWrong(get(site, n)));
  const band = bandChart(of(valueOf), wrong(valueOf), labels, width);
  const small = [
    smallChart("Norm", of(valueOf)("norm"), wrong(valueOf), labels, numeral, ""),
    smallChart("Max |x|", of(valueOf)("abs_max"), wrong(valueOf), labels, numeral, ""),
    smallChart("Dead units", of(valueOf)("dead"), wrong(valueOf), labels, percent, ""),
    smallChart(
      "Gradient norm",
      of(gradOf)("norm"),
      wrong(gradOf),
      labels,
      numeral,
      "second",
    ),
    smallChart(
      "Gradient / value",
      steps.map((_, n) => ratio(site, n)),
      wrong(gradOf),
      labels,
      numeral,
      "second",
    ),
  ].filter(Boolean);
  if (!band && !small.length) return null;
  return sectionOf(
    "Over steps",
    `${labels[0]} to ${labels[labels.length - 1]}`,
    ...(band || []),
    small.length ? make("div", { class: "small-charts" }, ...small) : null,
  );
}

function numbersSection(site, value, grad) {
  if (!value && !grad) return sectionOf("Numbers", "nothing was measured here");
  const lines = [
    ["Count", "count", whole],
    ["Mean", "mean"],
    ["Standard deviation", "std"],
    ["Smallest", "low"],
    ["Largest", "high"],
    ["Largest magnitude", "abs_max"],
    ["Norm", "norm"],
    ["Dead units", "dead", percent],
    ["NaN", "nan", whole],
    ["Infinite", "infinite", whole],
  ];
  const body = make("tbody");
  for (const [label, key, show = numeral] of lines) {
    const [a, b] = [value, grad].map((figures) => (figures ? figures[key] : undefined));
    if (a === undefined && b === undefined) continue;
    const cell = (x) =>
      make(
        "td",
        {
          class: (key === "nan" || key === "infinite") && x ? "wrong" : null,
          title: isNumber(x) ? String(x) : null,
        },
        show(x),
      );
    body.append(
      make(
        "tr",
        null,
        make("th", { scope: "row" }, label),
        cell(a),
        grad ? cell(b) : null,
      ),
    );
  }
  const found = ratio(site);
  if (found !== null)
    body.append(
      make(
        "tr",
        null,
        make("th", { scope: "row" }, "Gradient norm / value norm"),
        make("td"),
        make("td", null, numeral(found)),
      ),
    );
  const head = grad
    ? make(
        "thead",
        null,
        make(
          "tr",
          null,
          make("th"),
          make("th", { scope: "col" }, "value"),
          make("th", { scope: "col" }, "gradient"),
        ),
      )
    : null;
  return sectionOf("Numbers", "", make("table", { class: "numbers" }, head, body));
}

function close() {
  open(null);
  table.focus({ preventScroll: true });
}
