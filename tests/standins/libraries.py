"""How stand-ins register ops with torch or make modules to import, and note what is called."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from tests.helpers import importable


def noted(calls: list[str], name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """`body`, whose calls are noted by this name."""

    def run(*given: Any, **more: Any) -> Any:
        calls.append(name)
        return body(*given, **more)

    return run


def name_of(schema: str) -> str:
    return schema.partition("(")[0]


def register(
    namespace: str, bodies: dict[str, Callable[..., Any]], calls: list[str]
) -> torch.library.Library:
    """Bodies for CPU tensors by schema, unless the package is installed: it defines its ops itself
    once it is loaded."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema, body in bodies.items():
        name = name_of(schema)
        if not find_spec(namespace) and not hasattr(getattr(torch.ops, namespace), name):
            library.define(schema)
            library.impl(name, noted(calls, name, body), "CPU")
    return library


@contextmanager
def registered(bodies: dict[str, Callable[..., Any]]) -> Iterator[list[str]]:
    """Within the block sgl_kernel has these ops, by schema; yields the names of those called, in
    order."""
    calls: list[str] = []
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    names = [*map(name_of, bodies)]
    for name, (schema, body) in zip(names, bodies.items(), strict=True):
        library.define(schema)
        library.impl(name, noted(calls, name, body), "CPU")
    try:
        yield calls
    finally:
        library._destroy()
        for name in names:
            vars(torch.ops.sgl_kernel).pop(name, None)


def packages(functions: dict[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Within the block these can be imported, by dotted path, from packages that hold nothing
    else."""
    modules: dict[str, ModuleType] = {}
    for path, function in functions.items():
        module, _, name = path.rpartition(".")
        parts = module.split(".")
        for at in range(len(parts)):
            modules.setdefault(".".join(parts[: at + 1]), ModuleType(module)).__path__ = []
        setattr(modules[module], name, function)
    return importable(modules)
