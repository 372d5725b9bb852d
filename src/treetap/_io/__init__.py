# SPDX-License-Identifier: Apache-2.0
"""Files: weights, checkpoints, Records, and stores of many Records.

A file may come from anybody. So readers check what it says before they allocate or
change anything, run nothing that it names, and tell all that does not fit in one error.
Writers replace a file in one step, or leave what was there.

`files` has what all of them share: paths as arguments, the way to the disk, and the
errors of other libraries.
`safetensors_file` is the one format in which arrays are written as files: what is in a
file, one tensor at a time, and writing one. Above it lie two roads.

Values of a model go to files and back:

- `targets` lists them, with what cannot be written and where a new value belongs.
- `weight_rules` says which tensor of which layout each value is: the same rules for
  both directions.
- `weights` saves and loads them under these rules; `checkpoints` does it with Orbax,
  for any tree, sharded or not, under its own names.

Records of runs go to files and back:

- `record_descriptions` takes a Record apart into arrays and plain JSON, and puts it
  together.
- `record_file` keeps one Record as one file; `store` many in a folder, read by site, by
  batch, or shuffled.

`_report`, `_compare`, `nnx` and `_cli` may import this; it imports nothing beyond
`_train`.
"""
