# SPDX-License-Identifier: Apache-2.0
"""Two runs of a model beside each other, and the first site where they part.

The road through it, file by file:

- `sources`: either side, a Record, a mapping or a file, becomes a list of named arrays,
  none of which is read yet.
- `align`: finds for each array of the first side those of the second that it is to be
  compared with, by rules and by names, and how these are laid out.
- `unroll`: takes values of loops apart, so that pairs stand in the order in which their
  numbers were computed.
- `tolerances`: measures a pair, and decides whether the two count as different.
- `comparison`: `compare` itself, and what it returns.

The command line imports this folder, and the root names what is public.
"""
