# SPDX-License-Identifier: Apache-2.0
"""One of several processes that append to a store together: each its own shards."""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from treetap._io.store.writers import StoreWriter
from treetap._observe.records import Record, Site


def value_of(number):
    return np.arange(64, dtype=np.float32).reshape(16, 4) + 100 * number


def main():
    address, count, process, folder, first, last = sys.argv[1:]
    jax.distributed.initialize(address, int(count), int(process))
    mesh = jax.make_mesh((len(jax.devices()),), ("a",))
    with StoreWriter(folder) as writer:
        for number in range(int(first), int(last)):
            whole = value_of(number)
            sites = [
                Site(made(mesh, spec, whole), name=name)
                for name, spec in (("rows", ("a",)), ("columns", (None, "a")))
            ]
            same = Site(made(mesh, (), whole), name="same")
            loss = Site(np.float32(number), name="loss")
            record = Record((*sites, same, loss))
            assert writer.append(record, {"number": number}) == number
    print("appended", flush=True)


def made(mesh, spec, whole):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(whole.shape, sharding, lambda cut: whole[cut])


if __name__ == "__main__":
    main()
