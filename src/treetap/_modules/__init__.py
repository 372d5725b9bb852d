# SPDX-License-Identifier: Apache-2.0
"""Modules: classes that people derive their models from, and random streams."""


def __getattr__(name: str) -> object:
    """`Module`, which pickles of earlier versions look for here."""
    if name != "Module":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from treetap._modules.module import Module

    return Module
