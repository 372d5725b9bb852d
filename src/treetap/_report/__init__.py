# SPDX-License-Identifier: Apache-2.0
"""What a model is made of, and what a run of it was like, for people to read.

Two roads lead through it. Of a model, before it runs:

- `calls`: traces a call of a method, and lists the calls of all Modules inside it.
- `flops`: counts the operations of each. `texts`: values by their types.
- `rows`: one row for each distinct call, with the sizes of what its Module holds.
- `summary`: `summary` and `tabulate`, which show these.

Of a run, from what `observe` recorded:

- `pictures`: values as small heat maps.
- `page`: `report`, one HTML page; its template, style and scripts are in `page_files/`.

`table` draws all tables that the library prints, those of `_compare` and `_cli` too.
"""
