# SPDX-License-Identifier: Apache-2.0
"""Statistics: what a value is like, in a few numbers.

There are two ways to them, and one arithmetic. *Streaming*: a value is measured where
it is made, inside loops and on shards too, and only the small states of reducers come
out of the program. *Figures*: arrays that are there, or states that came out, are
turned into numbers on the host, for people and loggers.

The road, in the order of the files:

- `arithmetic`: what is measured of numbers, for NumPy and for JAX; counts beyond 32
  bits; histograms. Whoever adds a statistic begins here.
- `figures`: `Figures` and `Bars`, what people get, and how those of several parts of
  several arrays are put together.
- `reducers`: `Moments`, `Norm`, `Histogram` and the others: `measure`, `merge`,
  `finish`.
- `reduced`: `Reduced`, the states of some reducers of one value, and `Reduction`, by
  which the walk carries them through loops, branches and mappings.
- `measures`: `figures_of_all`, which measures arrays where they are, fetches all that
  is small at once, and reads it.

A session carries a `Reduction`; records, blame, reports and the command line ask for
figures. Nothing here knows of Modules or taps.
"""
