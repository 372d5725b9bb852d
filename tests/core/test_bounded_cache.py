# SPDX-License-Identifier: Apache-2.0
"""BoundedCache: what is used stays, what is not goes, whoever asks."""

import threading

from treetap._core.bounded_cache import BoundedCache


def test_the_least_recently_used_entry_goes():
    dropped = []
    cache = BoundedCache(2, dropped.append)
    cache.add("a", 1)
    cache.add("b", 2)
    assert cache.get("a") == 1
    cache.add("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert dropped == [2]
    assert len(cache) == 2
    assert [*cache] == [1, 3]


def test_the_first_value_of_a_key_is_kept():
    cache = BoundedCache(2)
    assert cache.add("a", 1) == 1
    assert cache.add("a", 2) == 1
    assert cache.made("a", lambda: 3) == 1
    assert cache.made("b", lambda: 4) == 4


def test_entries_can_be_dropped():
    cache = BoundedCache(3)
    for name in "abc":
        cache.add(name, name)
    cache.discard("a")
    cache.discard("a")
    assert [*cache] == ["b", "c"]
    cache.clear()
    assert len(cache) == 0


def test_threads_may_share_one():
    cache, errors = BoundedCache(8), []

    def use(start):
        try:
            for n in range(2_000):
                key = (start * 7 + n) % 40
                assert cache.made(key, lambda key=key: key + 1) == key + 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(cache) == 8
