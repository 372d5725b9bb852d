# SPDX-License-Identifier: Apache-2.0
"""The core: what a model is made of, and what can be done with it as a tree.

A model is a tree (or a graph) of objects that hold Variables. Here are both, with the
rules they obey wherever they are: which attributes are children, who may write when,
what is shared, how an object becomes a description with values beside it, and an object
again. Nothing here knows of neural networks, of capture or of transforms.

Small things that all else uses:

- `errors` lists every exception that is raised on purpose, `wording` has the texts of
  messages: lists of the first few, names from elsewhere, types of arrays.
- `settings` are the switches with a scope (graph mode, sharding), and the three modes.
- `static_values` says when two static values are the same, and whether one was changed
  in place since it was looked at.
- `paths` are how values are found, with one level of any container that JAX knows.
- `trace_level` tells at which trace an object was made: only there may it change.
- `display` prints objects, as text and in notebooks.
- `public_names` reads the stub of a package, so that names load when they are used;
  `scopes` sets context variables for a block; `bounded_cache` is the one cache that
  forgets; `earlier_names` finds modules by the names that old pickles have for them.

And the two halves: `variables`, boxes with a value and metadata, and `trees`, objects
around them.

Every folder imports this one; it imports none.
"""
