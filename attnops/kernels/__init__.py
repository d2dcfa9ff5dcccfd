"""The kernels: one backend a folder. Every module of these folders is loaded, and every entry point
of the group `attnops.kernels`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil

from attnops.core.kernel import FAILURES, report_broken, said, together

GROUP = "attnops.kernels"


def load_own() -> None:
    """Import the modules of the backends' folders and of this one; each registers its kernels.
    Deeper folders hold what they import."""
    for folder in (
        *(f"{module.name}." for module in pkgutil.iter_modules(__path__) if module.ispkg),
        "",
    ):
        paths = [os.path.join(path, folder[:-1]) for path in __path__]
        for module in pkgutil.iter_modules(paths):
            if not module.ispkg:
                importlib.import_module(f"{__name__}.{folder}{module.name}")


def load_third_party() -> None:
    """Import the modules that other packages name in the entry-point group.

    One that fails is reported, registers nothing, and harms no other.
    """
    try:
        entries = tuple(importlib.metadata.entry_points(group=GROUP))
    except FAILURES as error:  # whatever the metadata of a stranger's package raise
        report_broken(f"the entry points of {GROUP}", said(error))
        return
    for entry in entries:
        try:
            with together():
                entry.load()
        except FAILURES as error:  # whatever a stranger's module raises
            report_broken(f"{entry.name} ({entry.value})", said(error))
