# SPDX-License-Identifier: Apache-2.0
"""Marks of change: how a repeated call knows that nothing has changed, without looking.

A compiled call that is made again with the same objects would have to look at each of
them: has it the children it had, have its Variables their metadata, what are their
values? Two marks, which every change anywhere leaves, let it skip that. They are for
the whole process, and say no more than "something changed": then the call looks.

**last_change** is about structure. It holds an object without meaning, and another one
after each change of a Variable's metadata or of the children of an object that JAX has
seen. Who wants to rely on structure reads the mark, looks at the structure, and keeps
the mark he read. While `last_change` still holds that very object, what he saw holds.

Why this is sound: a change is made first and marked afterwards. A reader who saw the
state before a change has read the mark before it, too, and will find another one. A
mark is compared by identity and never comes back, as those who keep one keep it alive;
a counter could come back, when two threads add to it at once.

**last_values** is about values. It is a room, under the key None, in which a finished
call leaves the values of all its Variables, so that the next call with the same objects
need not read them one by one. A call takes out what is there, which empties the room;
at its end it puts its own values in only if the room is still empty. Whoever writes
into a Variable that is there already puts None into it, before the write and after.

Why this is sound: values that are in the room were put there after all writes that had
begun, or the None of one of these would have been found; taking out (`pop`) and putting
in (`setdefault`) are single steps for other threads. The None before a write is for an
interrupt between the write and the second None. The one after it is for another call
that read old values, and left them, between the first None and the write.
"""

from typing import Any

last_change: list[object] = [object()]
last_values: dict[None, Any] = {}


def note_change() -> None:
    """Marks that metadata, or the children of an object, were changed just now."""
    last_change[0] = object()
