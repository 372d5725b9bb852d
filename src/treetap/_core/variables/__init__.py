# SPDX-License-Identifier: Apache-2.0
"""Variables: boxes with one value each, which say what kind of value it is.

- `variable` is the box itself: reading, writing, copying, and the functions in C by
  which many are handled at once. `values` is what can be inside, and how one part of it
  is replaced; `metadata` the named facts beside it; `operators` the arithmetic that
  makes a Variable as good as its value in an expression.
- `kinds` are the classes by which people tell Variables apart: `Param`, `BatchStat`, …
- `placement` puts a new value where its `out_sharding` says.

Two files are about the speed of calls that are made again and again:

- `change_marks` tells without looking that nothing has changed.
- `packed_values` keeps the values of many small Variables in a few flat buffers.

It imports the files of `_core` beside it. `trees` is built on it.
"""
