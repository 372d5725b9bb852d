# SPDX-License-Identifier: Apache-2.0
"""Trees: objects of Modules and Variables, taken apart, put together and visited."""
