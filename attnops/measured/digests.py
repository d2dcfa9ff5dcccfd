"""Digests of the code of our kernels: a results file keeps them (`code`), so that its page can say
later what has changed since.

A kernel's code is the module of its functions and what that imports of `kernels`, of references and of
`core.tensors`.
A digest is of the syntax trees of those files, statement by statement: neither positions, comments,
docstrings and imports count, nor in which of the files a statement stands, nor where.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from attnops.core.kernel import Kernel, all_kernels
from attnops.core.problem import Problem, Target

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("attnops.kernels.", "attnops.core.tensors", "attnops.reference.")
"""Of what kernels run; in the trees of older commits the references had a folder."""
OPS, OF_FAMILIES = "attnops.ops.", ("reference", "_format")
"""How the names of a family's modules end that kernels run."""

LENGTH = 12

Read = Callable[[str], str | None]
"""Takes a path below the package, as `kernels/torch/sdpa.py`, and gives its text; None where there is no such file."""


def digests(kernels: Iterable[Kernel], read: Read | None = None) -> dict[str, str]:
    """By `op.kernel`, of those of `kernels` that are ours.

    read: of the tree of another commit. A kernel whose modules it lacks has "", for its code was in
    other files then.
    """
    found = dict[frozenset[str], str]()
    out = {}
    for kernel in kernels:
        modules = frozenset(modules_of(kernel))
        if modules and modules not in found:
            found[modules] = digest(modules, read) if read else _here(modules)
        if modules:
            out[f"{kernel.op}.{kernel.name}"] = found[modules]
    return dict(sorted(out.items()))


@functools.cache
def _here(modules: frozenset[str]) -> str:
    return digest(modules, here)


def candidates(target: Target, ops: Collection[str] = (), packages: Iterable[str] = ()) -> list[Kernel]:
    """The kernels that may have run on a machine.

    ops: of these; () is of all. packages: the modules that were installed there, with their versions
    as in a results file.
    """
    there = {name.partition("==")[0] for name in packages}
    return [k for k in all_kernels() if (not ops or k.op in ops) and _may_run(k, target, there)]


def _may_run(kernel: Kernel, target: Target, there: Collection[str]) -> bool:
    if kernel.judge and target.on_gpu:
        return False
    refused = {refusal.field for refusal in kernel.unmet(Problem.of(kernel.op, target))}
    return not refused & {"target", "device"} and all(p.module in there for p in kernel.packages)


def here(path: str) -> str | None:
    """The text of a file of this package."""
    file = ROOT / path
    return file.read_text() if file.is_file() else None


def digest(modules: Iterable[str], read: Read) -> str:
    """Of these modules and what they import; "" where one is missing."""
    waiting, statements = sorted(modules), dict[str, tuple[str, ...]]()
    if not all(_text(module, read) for module in waiting):
        return ""
    while waiting:
        module = waiting.pop()
        if module not in statements and (text := _text(module, read)) is not None:
            statements[module], imported = _parsed(text)
            waiting += imported
    every = sorted(one for some in statements.values() for one in some)
    return hashlib.sha256("\n".join(every).encode()).hexdigest()[:LENGTH]


def _text(module: str, read: Read) -> str | None:
    path = module.removeprefix("attnops.").replace(".", "/")
    return read(f"{path}.py")


# Where a kernel's functions are ----------------------------------------------------------------------------------------


def modules_of(kernel: Kernel) -> set[str]:
    """The modules of what a kernel runs. Empty for a kernel of another package."""
    runs = [kernel.run, *([] if kernel.core is None else [kernel.core.run])]
    return {m for run in runs for part in _parts(run) if _counts(m := _module(part))}


def _counts(module: str) -> bool:
    """Is its code a kernel's?"""
    return module.startswith(FOLDERS) or (module.startswith(OPS) and module.endswith(OF_FAMILIES))


def _parts(run: Any) -> Iterator[Any]:
    """A function, those that it wraps, and those that are bound into it."""
    yield run
    for inner in (getattr(run, "__wrapped__", None), getattr(run, "func", None), *getattr(run, "args", ())):
        if callable(inner):
            yield from _parts(inner)


def _module(function: Any) -> str:
    """A function that is imported when it is called says from where."""
    found = getattr(function, "path", None) or getattr(function, "__globals__", {}).get("__name__")
    return str(found or "")


# The statements of a file ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(a digest of each statement, the modules of `FOLDERS` that may be imported) of a file."""
    tree = ast.parse(text)
    shown = (_shown(node) for node in tree.body)
    statements = tuple(hashlib.sha256(one.encode()).hexdigest() for one in shown if one)
    return statements, tuple(m for node in ast.walk(tree) for m in _imported(node))


def _imported(node: ast.AST) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    yield from filter(_counts, names)


def _shown(node: ast.AST) -> str:
    """A node as text that is the same in every version of Python; "" for one that says nothing."""
    if isinstance(node, (ast.Import, ast.ImportFrom)) or _is_text(node):
        return ""
    return f"{type(node).__name__}({','.join(_fields(node))})"


def _is_text(node: ast.AST) -> bool:
    """Is it a docstring, of a constant, too?"""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _fields(node: ast.AST) -> Iterator[str]:
    # Fields that a later Python adds are empty in older code.
    for name, value in ast.iter_fields(node):
        shown = _value(value)
        if name not in ("ctx", "kind", "type_comment") and shown:
            yield f"{name}={shown}"


def _value(value: Any) -> str:
    if isinstance(value, ast.AST):
        return _shown(value)
    if isinstance(value, list):
        return ";".join(filter(None, map(_value, value)))
    return "" if value is None else repr(value)
