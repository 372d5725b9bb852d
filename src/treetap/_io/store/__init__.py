# SPDX-License-Identifier: Apache-2.0
"""Stores: the Records of many batches in a folder, safe against being killed.

A folder has an array for each leaf of a Record, in which the rows of all batches lie
one after the other, and a journal with a line for each batch. A batch is written in
this order:

1. `writers` takes the Record apart and compares it with what the store has. `axes` says
   along which axis of each value the batches are joined.
2. `arrays` makes room, and writes each shard of each value where it belongs.
3. When all numbers are on the disk, `journals` appends one line with a checksum, and
   waits until that is on the disk, too.

When `append` returns the batch is on the disk; with a buffer, `backlog` hands it to a
thread, which goes these steps with all batches that wait, at once.

So the line decides. A program killed before it leaves numbers that nobody counts and
the next batch writes over; one killed while it writes leaves a torn line that readers
pass over. `contents` reads the journals, and checks what they say; `stores` reads
Records and rows by it, as they are asked for.
"""
