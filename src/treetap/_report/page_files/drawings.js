// SPDX-License-Identifier: Apache-2.0
// Drawings: sparklines, histograms, lines, and pictures of values and attention.

// ---- Small drawings -----------------------------------------------------------------

function spark(figures, width = 108, height = 20) {
  if (!figures || !figures.bars) return null;
  const counts = trimmed(figures).counts;
  const most = Math.max(...counts, 1),
    step = width / counts.length;
  let path = "";
  counts.forEach((count, n) => {
    if (!count) return;
    const tall = Math.max(1, (count / most) * height);
    path += `M${(n * step).toFixed(1)} ${height}v${(-tall).toFixed(1)}h${Math.max(0.6, step - 0.4).toFixed(1)}v${tall.toFixed(1)}z`;
  });
  return draw(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `Histogram from ${numeral(figures.low)} to ${numeral(figures.high)}`,
    },
    draw("path", { class: "fill", d: path }),
  );
}

// Bins of magnitudes reach far beyond the values: empty ones at the ends are left out,
// and zeros, which are in the first one, stand apart.
function trimmed(figures) {
  let { counts, edges, log } = figures.bars;
  if (edges.length === 2) {
    const [low, high] = edges,
      n = counts.length;
    edges = Array.from({ length: n + 1 }, (_, k) =>
      log ? low * (high / low) ** (k / n) : low * (1 - k / n) + high * (k / n),
    );
  }
  if (!log) return { counts, edges, log };
  let from = 1,
    to = counts.length;
  while (from < to - 1 && !counts[from]) from++;
  while (to > from + 1 && !counts[to - 1]) to--;
  const kept = {
    counts: counts.slice(from, to),
    edges: edges.slice(from, to + 1),
    log,
  };
  if (!counts[0]) return kept;
  const width = kept.edges[1] / kept.edges[0];
  kept.counts.unshift(counts[0], 0);
  kept.edges.unshift(kept.edges[0] / width ** 2, kept.edges[0] / width);
  return { ...kept, zeros: edges[1] };
}

function strip(figures) {
  if (!figures || !figures.parts) return null;
  return trace(
    figures.parts.std || figures.parts.norm || [],
    figures.parts.bad || [],
    80,
    20,
  );
}

function runCell(site) {
  const of = (key) => steps.map((_, n) => (valueOf(site, n) || {})[key]);
  const wrong = steps.map((_, n) => isWrong(valueOf(site, n)));
  return trace(of("std").some(isNumber) ? of("std") : of("norm"), wrong, 80, 20);
}

// A line of a few numbers, red where they were not finite.
function trace(series, wrong, width, height) {
  const found = series.filter(isNumber);
  const low = Math.min(...found, 0),
    high = Math.max(...found, low + 1e-12);
  const x = (n) => 3 + (n * (width - 6)) / Math.max(1, series.length - 1);
  const y = (v) => height - 3 - share(v, low, high) * (height - 6);
  const svg = draw("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "aria-hidden": "true",
  });
  svg.append(draw("path", { class: "curve", d: linePath(series, x, y) }));
  series.forEach((value, n) => {
    if (wrong[n])
      svg.append(
        draw("circle", {
          class: "mark",
          cx: x(n),
          cy: isNumber(value) ? y(value) : height / 2,
          r: 2.5,
        }),
      );
    else if (series.length === 1)
      svg.append(draw("circle", { class: "fill", cx: x(n), cy: y(value), r: 2 }));
  });
  return svg;
}

function linePath(series, x, y) {
  let path = "",
    isDown = false;
  series.forEach((value, n) => {
    if (!isNumber(value)) {
      isDown = false;
      return;
    }
    path += `${isDown ? "L" : "M"}${x(n).toFixed(1)} ${y(value).toFixed(1)}`;
    isDown = true;
  });
  return path;
}

// ---- Large drawings -----------------------------------------------------------------

function ticks(low, high, count) {
  if (!Number.isFinite(high - low)) return [low, 0, high];
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const first = Math.ceil(low / step - 1e-9);
  const found = Array.from({ length: count + 2 }, (_, n) => (first + n) * step);
  return [...new Set(found)].filter((mark) => mark <= high + step * 1e-9);
}

function tickText(x) {
  const text = numeral(Number(x.toPrecision(6)));
  return text.includes(".") ? text.replace(/\.?0+(?=e|$)/, "") : text;
}

function histogram(figures, kind, width, tell) {
  const { counts, edges, log, zeros } = trimmed(figures);
  const height = 122,
    base = 102,
    place = log ? Math.log10 : (v) => v;
  const low = place(edges[0]),
    high = place(edges[edges.length - 1]);
  const x = (v) => share(place(v), low, high) * width;
  const tall = (count) => (state.log ? Math.log1p(count) : count);
  const most = Math.max(...counts.map(tall), 1e-9);
  const total = counts.reduce((a, b) => a + b, 0) || 1;
  const svg = draw("svg", {
    class: "chart",
    viewBox: `0 0 ${width} ${height}`,
    height,
    role: "img",
    "aria-label": "Histogram",
  });
  let path = "";
  counts.forEach((count, n) => {
    if (!count) return;
    const left = x(edges[n]),
      right = x(edges[n + 1]);
    const size = Math.max(1, (tall(count) / most) * (base - 6));
    path += `M${left.toFixed(2)} ${base}V${(base - size).toFixed(2)}H${Math.max(left + 0.5, right - 1).toFixed(2)}V${base}z`;
  });
  svg.append(draw("path", { class: `fill ${kind}`, d: path }));
  svg.append(
    draw("line", { class: "axis", x1: 0, x2: width, y1: base + 0.5, y2: base + 0.5 }),
  );
  const marks = log
    ? powers(place(edges[zeros ? 2 : 0]), high)
    : ticks(edges[0], edges[edges.length - 1], 5);
  for (const mark of marks)
    tick(svg, x(mark), base, width, log ? powerText(mark) : tickText(mark));
  if (zeros) tick(svg, (x(edges[0]) + x(edges[1])) / 2, base, width, "0");
  const middle = (n) => (x(edges[n]) + x(edges[n + 1])) / 2;
  hover(svg, width, base, (at) => {
    const n = at === null ? -1 : edges.findIndex((edge, k) => k && x(edge) >= at) - 1;
    if (n < 0) {
      tell(null);
      return null;
    }
    if (zeros && n < 2)
      tell(
        n
          ? ""
          : `below ${numeral(zeros)}: ${whole(counts[0])} (${percent(counts[0] / total)})`,
      );
    else
      tell(
        `${numeral(edges[n])} to ${numeral(edges[n + 1])}: ${whole(counts[n])} (${percent(counts[n] / total)})`,
      );
    return middle(n);
  });
  return svg;
}

function powers(low, high) {
  const from = Math.ceil(low),
    to = Math.floor(high),
    by = Math.max(1, Math.ceil((to - from) / 5));
  const found = [];
  for (let n = from; n <= to; n += by) found.push(10 ** n);
  return found;
}

function powerText(x) {
  const n = Math.round(Math.log10(x));
  return n >= -2 && n <= 3 ? tickText(x) : `1e${n}`.replace("-", "−");
}

function tick(svg, at, base, width, text) {
  const anchor = at < 14 ? "start" : at > width - 14 ? "end" : "middle";
  svg.append(draw("line", { class: "axis", x1: at, x2: at, y1: base, y2: base + 4 }));
  svg.append(draw("text", { x: at, y: base + 16, "text-anchor": anchor }, text));
}

// Follows the pointer: `tell` gets where it is, and says where to draw the line.
function hover(svg, width, height, tell) {
  const hair = draw("line", { class: "hair", y1: 0, y2: height, visibility: "hidden" });
  svg.append(hair);
  const at = (place) => {
    const x = tell(place);
    hair.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) {
      hair.setAttribute("x1", x);
      hair.setAttribute("x2", x);
    }
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    at(((event.clientX - box.left) / box.width) * width);
  });
  svg.addEventListener("pointerleave", () => at(null));
}

// The spread of values over iterations or steps: range, one deviation, mean.
function bandChart(of, wrong, labels, width) {
  const count = labels.length,
    height = 132,
    left = 40,
    base = 112;
  const [mean, std, low, high] = ["mean", "std", "low", "high"].map(of);
  const minus = mean.map((m, n) =>
    isNumber(m) && isNumber(std[n]) ? m - std[n] : null,
  );
  const plus = mean.map((m, n) =>
    isNumber(m) && isNumber(std[n]) ? m + std[n] : null,
  );
  const all = [...mean, ...minus, ...plus, ...low, ...high].filter(isNumber);
  if (!all.length) return null;
  const bottom = Math.min(...all),
    top = Math.max(...all, bottom + 1e-12);
  const x = (n) => left + 4 + (n * (width - left - 8)) / Math.max(1, count - 1);
  const y = (v) => base - 4 - share(v, bottom, top) * (base - 12);
  const svg = draw("svg", {
    class: "chart",
    viewBox: `0 0 ${width} ${height}`,
    height,
    role: "img",
    "aria-label": "Mean, deviation and range",
  });
  svg.append(draw("path", { class: "wide-band", d: areaPath(low, high, x, y) }));
  svg.append(draw("path", { class: "band", d: areaPath(minus, plus, x, y) }));
  svg.append(draw("path", { class: "curve", d: linePath(mean, x, y) }));
  for (const mark of ticks(bottom, top, 3)) {
    if (mark === 0)
      svg.append(
        draw("line", { class: "zero", x1: left, x2: width, y1: y(0), y2: y(0) }),
      );
    svg.append(
      draw(
        "text",
        { x: left - 6, y: y(mark) + 4, "text-anchor": "end" },
        tickText(mark),
      ),
    );
  }
  svg.append(
    draw("line", {
      class: "axis",
      x1: left,
      x2: width,
      y1: base + 0.5,
      y2: base + 0.5,
    }),
  );
  const every = Math.max(1, Math.ceil(count / 8));
  for (let n = 0; n < count; n += every) tick(svg, x(n), base, width, labels[n]);
  wrong.forEach((is, n) => {
    if (is) svg.append(draw("circle", { class: "mark", cx: x(n), cy: base - 4, r: 4 }));
  });
  const rest =
    (low.some(isNumber)
      ? "mean, one standard deviation, range"
      : "mean, one standard deviation") +
    (wrong.some(Boolean) ? "; red: not finite" : "");
  const readout = make("p", { class: "readout" }, rest);
  hover(svg, width, base, (at) => {
    const n = at === null ? -1 : nearest((at - left - 4) / (width - left - 8), count);
    readout.textContent =
      n < 0
        ? rest
        : `${labels[n]}: mean ${numeral(mean[n])}, std ${numeral(std[n])}${isNumber(low[n]) ? `, ${numeral(low[n])} to ${numeral(high[n])}` : ""}${wrong[n] ? ", not finite" : ""}`;
    return n < 0 ? null : x(n);
  });
  return [svg, readout];
}

const nearest = (part, count) =>
  Math.min(count - 1, Math.max(0, Math.round(part * (count - 1))));

function areaPath(lower, upper, x, y) {
  const found = lower
    .map((v, n) => n)
    .filter((n) => isNumber(lower[n]) && isNumber(upper[n]));
  if (!found.length) return "";
  const there = found.map((n) => `${x(n).toFixed(1)} ${y(upper[n]).toFixed(1)}`);
  const back = found
    .reverse()
    .map((n) => `${x(n).toFixed(1)} ${y(lower[n]).toFixed(1)}`);
  return `M${[...there, ...back].join("L")}z`;
}

function smallChart(label, series, wrong, labels, show, kind) {
  const found = series.filter(isNumber);
  if (found.length < 2) return null;
  const width = 210,
    height = 56;
  const low = Math.min(...found, 0),
    high = Math.max(...found, low + 1e-12);
  const x = (n) => 3 + (n * (width - 6)) / Math.max(1, series.length - 1);
  const y = (v) => height - 4 - share(v, low, high) * (height - 10);
  const svg = draw(
    "svg",
    {
      class: "chart",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": label,
    },
    draw("line", {
      class: "axis",
      x1: 0,
      x2: width,
      y1: height - 0.5,
      y2: height - 0.5,
    }),
    draw("path", { class: `curve ${kind}`, d: linePath(series, x, y) }),
  );
  wrong.forEach((is, n) => {
    if (is)
      svg.append(draw("circle", { class: "mark", cx: x(n), cy: height - 4, r: 3.5 }));
  });
  const last = [...series].reverse().find(isNumber);
  const told = make("span", null, show(last));
  hover(svg, width, height, (at) => {
    const n = at === null ? -1 : nearest((at - 3) / (width - 6), series.length);
    told.textContent = n < 0 ? show(last) : `${labels[n]}: ${show(series[n])}`;
    return n < 0 ? null : x(n);
  });
  return make(
    "figure",
    null,
    make("figcaption", null, make("span", null, label), told),
    svg,
  );
}

// ---- Pictures -----------------------------------------------------------------------

const isDark = () =>
  root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;

const ramps = {
  heat: {
    light: [
      [102, 58, 8],
      [191, 129, 45],
      [246, 232, 195],
      [250, 250, 249],
      [199, 234, 229],
      [53, 151, 143],
      [0, 72, 62],
    ],
    dark: [
      [255, 214, 140],
      [205, 140, 50],
      [92, 62, 26],
      [26, 30, 33],
      [20, 74, 68],
      [53, 160, 148],
      [170, 242, 230],
    ],
  },
  attention: {
    light: [
      [250, 250, 249],
      [199, 234, 229],
      [92, 178, 168],
      [11, 114, 104],
      [0, 56, 50],
    ],
    dark: [
      [26, 30, 33],
      [20, 66, 61],
      [38, 124, 114],
      [90, 198, 182],
      [214, 255, 247],
    ],
  },
};

// 255 colours from low to high; the last number, 255, is for what is not finite.
function palette(kind) {
  const stops = ramps[kind][isDark() ? "dark" : "light"];
  const colours = [];
  for (let n = 0; n < 255; n++) {
    // Attention is mostly small: its colours begin to change early.
    const part = kind === "attention" ? Math.sqrt(n / 254) : n / 254;
    const at = part * (stops.length - 1),
      k = Math.min(stops.length - 2, Math.floor(at));
    colours.push(stops[k].map((c, i) => c + (stops[k + 1][i] - c) * (at - k)));
  }
  colours.push(isDark() ? [255, 90, 96] : [214, 30, 48]);
  return colours;
}

function paint(canvas, bytes, rowCount, columnCount, kind) {
  canvas.width = columnCount;
  canvas.height = rowCount;
  const context = canvas.getContext("2d"),
    image = context.createImageData(columnCount, rowCount);
  const colours = palette(kind);
  for (let n = 0; n < rowCount * columnCount; n++) {
    image.data.set(colours[bytes[n]], 4 * n);
    image.data[4 * n + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

function pictureSection(site) {
  const picture = site.pictures;
  if (!picture) return null;
  const isAttention = picture.kind === "attention",
    count = picture.tiles.length;
  const across = count === 1 ? 1 : count <= 4 ? 2 : count <= 9 ? 3 : 4;
  const tiles = make("div", {
    class: "tiles",
    style: `grid-template-columns: repeat(${across}, 1fr)`,
  });
  for (const tile of picture.tiles) {
    const canvas = paint(
      make("canvas", { role: "img", "aria-label": tile.label || "Values" }),
      bytesOf(tile.data),
      picture.rows,
      picture.columns,
      picture.kind,
    );
    const shape = picture.rows / picture.columns;
    canvas.style.aspectRatio = `1 / ${Math.min(1.25, Math.max(0.25, shape))}`;
    tiles.append(
      make(
        "figure",
        null,
        canvas,
        tile.label ? make("figcaption", null, tile.label) : null,
      ),
    );
  }
  const bar = paint(
    make("canvas"),
    Uint8Array.from({ length: 255 }, (_, n) => n),
    1,
    255,
    picture.kind,
  );
  const legend = make(
    "p",
    { class: "legend" },
    isAttention ? "0" : numeral(-picture.scale),
    bar,
    numeral(picture.scale),
  );
  if (picture.wrong) legend.append(make("span", { class: "swatch" }), "not finite");
  const notes = [picture.of];
  if (picture.block[0] * picture.block[1] > 1)
    notes.push(`means of ${picture.block.join("×")}`);
  if (picture.shown < picture.total) notes.push(`${picture.shown} of ${picture.total}`);
  if (steps.length > 1) notes.push(`step ${steps[picture.step]}`);
  return sectionOf(
    isAttention ? "Attention patterns" : "Values",
    notes.join(" · "),
    tiles,
    legend,
  );
}
