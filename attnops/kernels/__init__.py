"""The kernels: one backend a file. Every module in this folder is loaded, and every entry point of the group `attnops.kernels`."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil

from attnops.kernel import report_broken

GROUP = "attnops.kernels"


def load_own() -> None:
    """Import the modules of this folder; each registers its kernels."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")


def load_third_party() -> None:
    """Import the modules that other packages name in the entry-point group. One that fails is reported and harms no other."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # whatever a stranger's module raises
            report_broken(f"{entry.name} ({entry.value})", f"{type(error).__name__}: {error}")
