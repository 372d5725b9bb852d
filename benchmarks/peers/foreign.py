# SPDX-License-Identifier: Apache-2.0
"""What `tap_scopes` can name in models of other libraries, which are not edited.

For each model, a table of the module calls that the library itself knows of: the site
found for each, and whether its value is that which the library captures. Then the sites
that are no module's, and what could not be named. The numbers are checked.
"""

import collections
import importlib.metadata

import foreign_models
import jax
import numpy as np

import treetap as tt

PACKAGES = ("jax", "flax", "dm-haiku", "equinox", "penzai")
NAMED = {  # found, of all calls of modules
    "linen": (16, 18),
    "linen, scan of remat": (5, 6),
    "haiku": (16, 16),
    "equinox": (9, 10),
    "penzai": (7, 10),
}


def verdict(values, site):
    """How the values of a site are those that a library gives."""
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(site.value)]
    notes = []
    for value in map(np.asarray, values):
        moved = [
            axis
            for leaf in found
            if leaf.size == value.size
            for axis in range(leaf.ndim)
            if np.moveaxis(leaf, axis, 0).shape == value.shape
            and np.allclose(np.moveaxis(leaf, axis, 0), value, atol=1e-6)
        ]
        if not moved:
            return "DIFFERENT"
        notes += [f"batch axis at {moved[0]}"] if moved[0] else []
    more = len(found) - len(values)
    notes += [f"and {more} more that leave"] if more else []
    return "same" + "".join(f", {note}" for note in notes)


def checked(case):
    """Prints the table of a model; gives how many calls were named, of how many."""
    plain = case.fn(*case.args)
    out, record = tt.observe(tt.tap_scopes(case.fn))(*case.args)
    assert jax.tree.all(jax.tree.map(np.allclose, plain, out))
    by_path = collections.defaultdict(collections.deque)
    for site in record:
        by_path["/".join(site.path)].append(site)
    rows, missing = [], []
    for name, path, values in case.calls:
        if not path or not by_path[path]:
            missing.append(name)
            continue
        site = by_path[path].popleft()
        told = verdict(values, site)
        assert told != "DIFFERENT", (name, path)
        rows.append((name, site.text, told))
    print(f"\n{case.name}: {len(rows)} of {len(case.calls)} module calls are sites")
    widths = [max(len(row[n]) for row in rows) for n in range(2)]
    for name, text, told in rows:
        print(f"  {name:{widths[0]}}  {text:{widths[1]}}  {told}")
    extra = [site.text for sites in by_path.values() for site in sites]
    print(f"  scopes that are no module's call: {', '.join(extra) or 'none'}")
    print(f"  not named: {', '.join(missing) or 'none'}")
    return len(rows), len(case.calls)


def check_transforms(case):
    """The same sites in a compiled step; how many have a gradient; an edit arrives."""
    *rest, x = case.args
    tapped = tt.tap_scopes(case.fn)

    def loss(x):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(tapped(*rest, x))[:1])

    _, record = tt.observe(tapped)(*case.args)
    step = jax.jit(jax.grad(loss))
    gradient, both = tt.observe(step, grads=True)(x)
    assert [site.text for site in both] == [site.text for site in record]
    assert np.allclose(gradient, step(x), atol=1e-6)
    count = sum(site.grad is not None for site in both)
    first = record[0].text
    edited = tt.edit(jax.jit(loss), {first: tt.edits.scale(0.5)})(x)
    assert not np.allclose(edited, loss(x)), first
    print(f"  under jit and grad: the same sites, {count} of them have gradients")


def main():
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    print(", ".join(versions))
    for make in foreign_models.CASES:
        case = make()
        found = checked(case)
        check_transforms(case)
        assert found == NAMED[case.name], (case.name, found)


if __name__ == "__main__":
    main()
