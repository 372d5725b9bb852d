# SPDX-License-Identifier: Apache-2.0
"""The lift: how every transform handles Variables, in one place."""
