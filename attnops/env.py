"""The two environment variables attnops reads, and the only place that reads them."""

from __future__ import annotations

import os
from pathlib import Path


def default_policy_key() -> str:
    """`ATTNOPS_POLICY`: the policy in force outside every `attnops.use(...)`, as `Policy.key` writes it."""
    return os.environ.get("ATTNOPS_POLICY", "")


def cache_dir() -> Path:
    """`ATTNOPS_CACHE_DIR`: where tuning tables are kept. Default `~/.cache/attnops`. The folder is not created here."""
    return Path(os.environ.get("ATTNOPS_CACHE_DIR") or Path.home() / ".cache" / "attnops")
