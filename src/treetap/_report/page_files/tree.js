// SPDX-License-Identifier: Apache-2.0
// The tree of Modules and sites, and the filter, which speaks the library's selectors.

// ---- The tree -----------------------------------------------------------------------

const nodes = []; // in the order of the tree

function buildTree() {
  const top = { children: [], depth: -1, inner: new Map(), sites: [] };
  sites.forEach((site, index) => {
    site.index = index;
    let node = top;
    for (const key of site.path) {
      let next = node.inner.get(key);
      if (!next) {
        next = { key, inner: new Map(), sites: [], parent: node };
        node.inner.set(key, next);
      }
      node = next;
    }
    node.sites.push(site);
  });
  arrange(top, top.sites.length && top.sites.some(isCall) ? top : null);
}

const isCall = (site) => site.name === "__call__" && site.call === 0;

// Makes rows of a place: its own call is on its row, other sites are rows below it.
function arrange(place, rootRow) {
  const call = place.sites.find(isCall) || null;
  const others = place.sites.filter((site) => site !== call);
  const isTop = !place.parent;
  let own = null;
  if (!isTop || rootRow) {
    const isLone = !call && others.length === 1 && !place.inner.size;
    own = {
      label: isTop ? (call && call.module) || data.title : place.key,
      site: call || (isLone ? others.pop() : null),
      isModule: true,
      parent: place.above || null,
      children: [],
    };
    own.name = own.site && own.site !== call ? own.site.name + callText(own.site) : "";
    nodes.push(own);
  }
  const below = [
    ...[...place.inner.values()].map((child) => [firstIndex(child), child, null]),
    ...others.map((site) => [site.index, null, site]),
  ].sort((a, b) => a[0] - b[0]);
  for (const [, child, site] of below) {
    if (child) {
      child.above = own;
      const made = arrange(child, null);
      if (own) own.children.push(made);
    } else {
      const leaf = {
        label: site.name + callText(site),
        site,
        parent: own,
        children: [],
        name: "",
      };
      nodes.push(leaf);
      if (own) own.children.push(leaf);
    }
  }
  return own;
}

const callText = (site) => (site.call ? `#${site.call}` : "");

function firstIndex(place) {
  if (place.first === undefined) {
    const found = place.sites.map((site) => site.index);
    for (const child of place.inner.values()) found.push(firstIndex(child));
    place.first = Math.min(...found);
  }
  return place.first;
}

function finishTree() {
  nodes.forEach((node, index) => {
    node.id = index;
    node.depth = node.parent ? node.parent.depth + 1 : 0;
    if (node.site) node.site.node = node;
  });
  for (const node of [...nodes].reverse()) {
    node.count = node.site ? 1 : 0;
    for (const child of node.children) node.count += child.count;
  }
  foldFrom(60);
}

// Folds what is deep, so that no more rows than a screen or two are shown at first.
function foldFrom(most) {
  const deepest = Math.max(0, ...nodes.map((node) => node.depth));
  let depth = deepest;
  while (depth > 1 && nodes.filter((node) => node.depth <= depth).length > most)
    depth--;
  state.folded = new Set(nodes.filter((n) => n.children.length && n.depth >= depth));
}

function reveal(node) {
  for (let above = node.parent; above; above = above.parent) state.folded.delete(above);
}

function countTroubles() {
  for (const node of [...nodes].reverse()) {
    node.troubles = node.site && isBad(node.site) ? 1 : 0;
    for (const child of node.children) node.troubles += child.troubles;
  }
}

// ---- The filter ---------------------------------------------------------------------

// The library's selectors: globs of paths and names, joined by `&` (or a blank), `|`
// and `~`; a word without any of their signs is looked for anywhere in the text.
function parseFilter(text) {
  text = text.trim();
  if (!text) return null;
  if (text.startsWith("re:")) {
    const pattern = new RegExp(text.slice(3));
    return (site) => pattern.test(fullName(site));
  }
  const choices = text.split("|").map((part) =>
    part
      .split(/[\s&]+/)
      .filter(Boolean)
      .map(parseTerm),
  );
  return (site) => choices.some((terms) => terms.length && terms.every((t) => t(site)));
}

function fullName(site) {
  return site.path.length ? `${site.path.join("/")}:${site.name}` : site.name;
}

function parseTerm(term) {
  if (/^[~!]./.test(term)) {
    const inner = parseTerm(term.slice(1));
    return (site) => !inner(site);
  }
  if (/[*?[:#]/.test(term)) return parseGlob(term);
  const wanted = term.toLowerCase();
  return (site) =>
    site.text.toLowerCase().includes(wanted) ||
    site.module.toLowerCase().includes(wanted);
}

function parseGlob(text) {
  const [body, call] = text.split("#", 2);
  const colon = body.indexOf(":");
  const place = colon < 0 ? body : body.slice(0, colon);
  const pattern = place.split("/").filter(Boolean).map(globPart);
  const name = colon < 0 ? null : globPart(body.slice(colon + 1) || "*");
  return (site) => {
    if (call && site.call !== Number(call)) return false;
    if (name) return name.test(site.name) && fits(pattern, site.path);
    return fits(pattern, site.path) || fits(pattern, [...site.path, site.name]);
  };
}

function globPart(part) {
  if (part === "**") return part;
  let source = "";
  for (let n = 0; n < part.length; n++) {
    const letter = part[n];
    const end = letter === "[" ? part.indexOf("]", n + 2) : -1;
    if (letter === "*") source += ".*";
    else if (letter === "?") source += ".";
    else if (end > 0) {
      const inside = part
        .slice(n + 1, end)
        .replace(/\\/g, "\\\\")
        .replace(/^!/, "^");
      source += `[${inside}]`;
      n = end;
    } else source += letter.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  }
  return new RegExp(`^(?:${source})$`, "su");
}

function fits(pattern, parts) {
  let ends = new Set([0]);
  for (const wanted of pattern) {
    const next = new Set();
    if (wanted === "**") {
      for (let n = Math.min(...ends); n <= parts.length; n++) next.add(n);
    } else {
      for (const n of ends)
        if (n < parts.length && wanted.test(parts[n])) next.add(n + 1);
    }
    if (!next.size) return false;
    ends = next;
  }
  return ends.has(parts.length);
}
