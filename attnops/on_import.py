"""Runs a function once a module is imported that `import attnops` leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def once_imported(name: str, action: Action) -> None:
    """Call `action` with the module of this name as soon as it is loaded.

    A finder in front of `sys.meta_path` waits for the module, and goes once it is loaded. One waits
    for each module: a second call for the same module changes nothing.

    Args:
        name: of a module that is not loaded yet.
        action: what it raises ends the import of the module.
    """
    # By the name of the class, which outlives a reload of this file.
    waiting = (finder for finder in sys.meta_path if type(finder).__name__ == Finder.__name__)
    if not any(getattr(finder, "name", None) == name for finder in waiting):
        sys.meta_path.insert(0, Finder(name, action))


class Finder:
    """Finds one module as the finders behind it do, and sees when it is loaded.

    It stays where loading fails, so that a second try is met, too.
    """

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action = name, action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The spec of that one module, with a loader around its own; None for all others."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None


class Loader:
    """The loader of one module, and what comes after it. The module keeps no trace of it."""

    def __init__(self, loader: Any, finder: Finder) -> None:
        self.loader, self.finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader itself makes it."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load the module as its own loader does, whose errors are the caller's."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.finder.action(module)
