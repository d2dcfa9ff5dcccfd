"""How stand-ins register ops with torch, and note what is called."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch


def noted(calls: list[str], name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """`body`, whose calls are noted by this name."""

    def run(*given: Any, **more: Any) -> Any:
        calls.append(name)
        return body(*given, **more)

    return run


def name_of(schema: str) -> str:
    return schema.partition("(")[0]


def register(namespace: str, bodies: dict[str, Callable[..., Any]], calls: list[str]) -> torch.library.Library:
    """Bodies for CPU tensors by schema, unless the package is installed: it defines its ops itself once it is loaded."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema, body in bodies.items():
        name = name_of(schema)
        if not find_spec(namespace) and not hasattr(getattr(torch.ops, namespace), name):
            library.define(schema)
            library.impl(name, noted(calls, name, body), "CPU")
    return library
