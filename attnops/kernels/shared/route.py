"""What kernels of several backends take, of the routing of a mixture."""

from __future__ import annotations

TAKES = frozenset(
    {"bias", "scoring", "groups", "top_groups", "group_best", "normalize", "eps", "scale"}
)
