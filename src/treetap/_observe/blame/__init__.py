# SPDX-License-Identifier: Apache-2.0
"""Blame: which operation made the first number that is not finite.

The road: `search` runs a program so that of every value a code comes out, whether it
has infinities or NaNs, by iteration and shard. `origins` goes back from the bad values
among the results to those that come from no other. `blame` has what people call, the
program that is kept for it, and the words for what was found.
"""
