# SPDX-License-Identifier: Apache-2.0
"""Guards: what reading a file from anybody may not do.

`tried` reads one input and says whether it was read or refused. Anything else is a
`Finding`: an error of another kind, one that cannot be printed, an input that takes
long or much memory, a file touched outside of the given folder, a program started.
"""

import contextlib
import os
import resource
import sys
import time
import traceback
import unicodedata
from typing import NamedTuple

import jax

import treetap

SECONDS = 5.0  # of work
LONGEST = 60.0  # seconds by the clock, as the machine may be busy
MEGABYTES = 300  # by which the largest memory of the process may grow
ROOM = 4 << 30  # bytes of address space that a reader may ask for

_ENDING = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
_LEAVING = ("socket.connect", "socket.bind", "urllib.Request", "pickle.find_class")
_TOUCHING = tuple(
    """
    open os.mkdir os.remove os.rename os.rmdir os.link os.chmod os.symlink os.truncate
    os.listdir os.scandir os.chown os.utime shutil.copyfile shutil.move shutil.rmtree
    shutil.copytree
""".split()
)


class Finding(AssertionError):
    """A reader did what it may not do."""


class _Watch:
    """Which files are touched while a reader is at work."""

    def __init__(self):
        self.folder = None
        self.seen = []
        self.is_emptying = False
        self.libraries = ()

    def __call__(self, event, args):
        if self.folder is None:
            return
        if (
            event in _ENDING
            or event in _LEAVING
            or (event in _TOUCHING and not self._may(event, args))
        ):
            self.seen.append(f"{event}{args!r:.200}")

    def _may(self, event, args):
        for place in args[: 2 if event in ("os.rename", "shutil.move") else 1]:
            # a file that is open already; what Python calls a text that it compiled
            if isinstance(place, int) or place == "<string>":
                continue
            # a folder of ours is emptied, name by name
            if self.is_emptying and place not in (".", "..") and "/" not in place:
                continue
            path = os.path.abspath(os.fsdecode(os.fspath(place or ".")))
            if path == self.folder or path.startswith(self.folder + os.sep):
                continue
            flags = args[2] if event == "open" else 0
            is_read = event in ("open", "os.listdir", "os.scandir") and not (
                (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            )
            # modules are imported when they are first needed
            is_library = path.startswith(self.libraries)
            is_library |= event == "os.listdir" and path in sys.path
            if not (is_read and is_library):
                return False
        self.is_emptying |= event == "shutil.rmtree"
        return True


_watch = _Watch()
_installed = []


def _install():
    if not _installed:  # a hook stays for the life of the process
        _installed.append(True)
        files = [module.__file__ for module in (jax, treetap)]
        packages = [os.path.dirname(os.path.dirname(file)) for file in files]
        roots = (sys.prefix, sys.base_prefix, *packages, *filter(None, sys.path))
        _watch.libraries = tuple(os.path.join(os.path.abspath(r), "") for r in roots)
        jax.numpy.zeros(1)  # which looks for devices
        sys.addaudithook(_watch)


@contextlib.contextmanager
def unwatched():
    """Lets the test itself put files in place."""
    folder, _watch.folder = _watch.folder, None
    try:
        yield
    finally:
        _watch.folder = folder


def _address_space():
    with open("/proc/self/statm") as opened:
        return int(opened.read().split()[0]) * resource.getpagesize()


class _Room:
    """Less address space, so that what asks for much fails and does not swap."""

    def __init__(self, is_bound):
        self._is_bound = is_bound and sys.platform == "linux"

    def __enter__(self):
        if self._is_bound:
            self._limits = resource.getrlimit(resource.RLIMIT_AS)
            limit = _address_space() + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (limit, self._limits[1]))

    def __exit__(self, *_):
        if self._is_bound:
            resource.setrlimit(resource.RLIMIT_AS, self._limits)


class Target(NamedTuple):
    """A reader under test.

    Attributes:
        seeds: Gives good inputs, and some that once were trouble.
        mutate: Makes another input of one: `mutate(data, random)`.
        read: Reads an input in a folder: `read(data, folder)`.
        allowed: The errors with which it may refuse an input.
        is_bound: Whether it is run with less address space. Not what allocates in
            threads of its own, which do not survive that.
    """

    seeds: object
    mutate: object
    read: object
    allowed: tuple
    is_bound: bool = True


def _unprintable(text):
    """Why a message cannot be shown at a terminal as it is; empty when it can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has lone surrogates"
    bad = {c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"}
    return f"has control characters {sorted(bad)}" if bad else ""


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tried(target, data, folder):
    """Reads an input in an empty folder; gives "read" or "refused".

    Args:
        target: The reader.
        data: The input.
        folder: Where its files go; there must be nothing else beside it.
    """
    _install()
    before, outcome = _peak(), "read"
    start, clock = time.process_time(), time.perf_counter()
    beside = sorted(os.listdir(os.path.dirname(folder)))
    _watch.seen.clear()
    _watch.is_emptying = False
    try:
        with _Room(target.is_bound):
            _watch.folder = os.path.abspath(folder)
            try:
                target.read(data, folder)
            finally:
                _watch.folder = None
    except target.allowed as error:
        outcome = "refused"
        if why := _unprintable(str(error)):
            raise Finding(f"the message {why}: {str(error)!r:.300}") from error
        if len(str(error)) > 50_000:
            raise Finding(f"the message has {len(str(error))} letters") from error
    except Finding:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-3:]
        lines = " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in where)
        told = f"{type(error).__name__}: {error!s:.300} at {lines}"
        raise Finding(told) from error
    seconds, waited = time.process_time() - start, time.perf_counter() - clock
    grown = _peak() - before
    if seconds > SECONDS or waited > LONGEST:
        raise Finding(f"{seconds:.1f} s for {len(data)} bytes")
    if grown > MEGABYTES:
        raise Finding(f"{grown:.0f} MB more memory for {len(data)} bytes")
    if _watch.seen:
        raise Finding(f"touched outside of the folder: {_watch.seen[:3]}")
    if sorted(os.listdir(os.path.dirname(folder))) != beside:
        raise Finding("something new lies beside the folder")
    return outcome
