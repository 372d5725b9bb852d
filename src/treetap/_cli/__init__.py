# SPDX-License-Identifier: Apache-2.0
"""The command line, `treetap`: what the library sees, without writing a program."""
