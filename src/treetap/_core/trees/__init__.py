# SPDX-License-Identifier: Apache-2.0
"""Trees: objects around Variables, visited, described, taken apart and put together.

What an object is:

- `attributes` decides which attributes are data (children) and which are static, and
  has the slots in which the library keeps what is its own (`Node`).
- `layout` is the set of attributes that objects share, by which children are read in C.
- `pytree` is the base class: it keeps children and static part ready for JAX, and
  drops them with every write.

An object as a description and a State, and back, in the order data takes:

- `graphdef` is the description: classes, static values, metadata, what is shared.
- `flatten` walks an object once and gives description and leaves.
- `state` holds leaves by name, in nested mappings; `filters` choose among them.
- `build` makes objects from a description: around values in order, leaves by name, or
  copies.
- `split` has the public functions on that road: split, merge, state, map, call.

What looks at objects, or changes them in place:

- `sharing` finds what stands at several places, and says so in errors.
- `traverse` is the walk over everything inside an object.
- `update` writes a State into an object, takes values out, and sets metadata: all of
  it, or nothing.
- `pickled_functions` lets JAX's compiled functions be attributes of pickled objects.

It imports `variables` and the files of `_core` beside it.
"""
