"""Which methods of a class call torch's `scaled_dot_product_attention`, read from their code."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.nn import functional as F

NAME = "scaled_dot_product_attention"
TORCHS = F.scaled_dot_product_attention


@functools.cache
def callers(cls: Any) -> tuple[str, ...]:
    """The methods of a class whose code calls torch's `scaled_dot_product_attention`, itself or
    through functions of its package.

    `forward` speaks for static methods and class methods.
    """
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__} - {"torch", "builtins"}
    # Of every base: a method may call the one that it overrides.
    methods = [
        (name, method)
        for base in reversed(cls.__mro__)
        for name, method in vars(base).items()
        if name != "__init__"
    ]
    found = [
        name if isinstance(method, FunctionType) else "forward"
        for name, method in methods
        if _calls(method, packages)
    ]
    return tuple(dict.fromkeys(found))


def calls_sdpa(cls: Any) -> bool:
    """Does the code of a class call torch's `scaled_dot_product_attention`?"""
    return bool(callers(cls))


def _calls(function: Callable[..., Any], packages: set[str]) -> bool:
    waiting: list[Any] = [function]
    seen: set[CodeType] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if (
            not isinstance(function, FunctionType)
            or function.__module__.partition(".")[0] not in packages
            or function.__code__ in seen
        ):
            continue
        seen.add(function.__code__)
        found = list(_named(function.__code__, function.__globals__))
        if any(each is TORCHS for each in found):
            return True
        waiting += found
    return False


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The globals that a code reads, the attributes of modules among them, and
    `scaled_dot_product_attention` of local names but `self`."""
    read: Any = None
    for step in dis.get_instructions(code):
        read = _read(step, read, names)
        if step.opname == "IMPORT_FROM" and "torch.nn.functional" not in code.co_names:
            read = None
        if read is not None and not isinstance(read, str):
            yield read
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)


def _read(step: dis.Instruction, before: Any, names: Mapping[str, Any]) -> Any:
    """The object that an instruction reads, or the name of a local variable, which may be a module,
    too. before: what the last one read."""
    name = step.argval
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return names.get(name)
    if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return name[-1] if isinstance(name, tuple) else name
    if step.opname == "IMPORT_FROM":
        return TORCHS if name == NAME else None
    if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return None
    if isinstance(before, ModuleType):
        return getattr(before, name, None)
    if not isinstance(before, str) or before == "self":
        return None
    return TORCHS if name == NAME else before
