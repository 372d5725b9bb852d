# SPDX-License-Identifier: Apache-2.0
"""Reports: what a model is made of and does, for people to read."""
