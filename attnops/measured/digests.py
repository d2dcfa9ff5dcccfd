"""Digests of the code of our kernels: a results file keeps them (`code`), so that its page can say
later what has changed since.

A kernel's code is every statement of the file of a backend where its function stands and is
registered, and of all other modules of `kernels`, of references and of `core.tensors` the
statements that its function, or this file, reaches by name. A digest is of the set of the
statements' syntax trees: neither positions, comments, docstrings and imports count, nor in which of
the files a statement stands, nor by which alias it names another.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from attnops.core.kernel import Kernel, all_kernels
from attnops.core.problem import Problem, Target
from attnops.measured.statements import WHOLE, File, Imported, Name, Statement, parsed, shown

ROOT = Path(__file__).resolve().parents[1]
KERNELS, SHARED = "attnops.kernels.", "attnops.kernels.shared."
FOLDERS = (KERNELS, "attnops.core.tensors", "attnops.reference.")
"""Of what kernels run; in the trees of older commits the references had a folder."""
OPS, OF_FAMILIES = "attnops.ops.", ("reference", "_format")
"""How the names of a family's modules end that kernels run."""

LENGTH = 12

Read = Callable[[str], str | None]
"""Takes a path below the package, as `kernels/torch/sdpa.py`, and gives its text; None where there
is no such file."""


def digests(kernels: Iterable[Kernel], read: Read | None = None) -> dict[str, str]:
    """By `op.kernel`, of those of `kernels` that are ours.

    read: of the tree of another commit. A kernel whose functions are not where they are in this
    tree has "", for its code was in other files then.
    """
    tree = Tree(read) if read else _today()
    found = dict[frozenset[Name], str]()
    out = {}
    for kernel in kernels:
        starts = frozenset(starts_of(kernel))
        if starts and starts not in found:
            found[starts] = tree.digest(starts)
        if starts:
            out[f"{kernel.op}.{kernel.name}"] = found[starts]
    return dict(sorted(out.items()))


@functools.cache
def _today() -> Tree:
    return Tree(here)


def candidates(
    target: Target, ops: Collection[str] = (), packages: Iterable[str] = ()
) -> list[Kernel]:
    """The kernels that may have run on a machine.

    ops: of these; () is of all. packages: the modules that were installed there, with their
    versions as in a results file.
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


# Where a kernel's functions are -------------------------------------------------------------------


def starts_of(kernel: Kernel) -> set[Name]:
    """Where the code of a kernel begins: (module, WHOLE or a name). Empty for a kernel of another
    package.

    Of its functions and of their wrappers it is the statement alone. A file of a backend that
    registers them, with what they need and cost, is WHOLE.
    """
    runs = [kernel.run, *([] if kernel.core is None else [kernel.core.run])]
    return {start for run in runs for start in _starts(run) if counts(start.module)}


def _starts(run: Any) -> Iterator[Name]:
    """Of a function, of those that it wraps, and of those that are bound into it."""
    inner = [
        f
        for f in (
            getattr(run, "__wrapped__", None),
            getattr(run, "func", None),
            *getattr(run, "args", ()),
        )
        if callable(f)
    ]
    module = _module(run)
    yield Name(module, WHOLE if not inner and _of_backend(module) else _name(run, module))
    if not inner and module.startswith(SHARED):
        yield from (
            Name(name, WHOLE)
            for name, loaded in [*sys.modules.items()]
            if _of_backend(name) and _holds(loaded, run)
        )
    for one in inner:
        yield from _starts(one)


def _holds(module: ModuleType, function: Any) -> bool:
    return any(value is function for value in vars(module).values())


def _of_backend(module: str) -> bool:
    """Is it a file that registers kernels?"""
    return (
        module.startswith(KERNELS)
        and not module.startswith(SHARED)
        and module.count(".") <= KERNELS.count(".") + 1
    )


def _module(function: Any) -> str:
    """A function that is imported when it is called says from where."""
    found = getattr(function, "path", None) or getattr(function, "__globals__", {}).get("__name__")
    return str(found or "")


def _name(function: Any, module: str) -> str:
    """Of the statement of a module that defines a function, which may be an inner one; WHOLE where
    it has none."""
    if isinstance(name := getattr(function, "name", None), str):
        return name  # of one that is imported when it is called
    file, code = _today().file(module), getattr(function, "__code__", None)
    if file is None or code is None:
        return WHOLE
    around = [statement for statement in file.statements if statement.holds(code.co_firstlineno)]
    return next((name for statement in around for name in sorted(statement.binds)), WHOLE)


def counts(module: str) -> bool:
    """Is its code a kernel's?"""
    return module.startswith(FOLDERS) or (module.startswith(OPS) and module.endswith(OF_FAMILIES))


# What is reached from there -----------------------------------------------------------------------


class Tree:
    """The modules of one commit. A kernel takes statements of them.

    read: gives their texts.
    """

    def __init__(self, read: Read) -> None:
        self._source = functools.cache(read)
        self._texts = dict[tuple[ast.stmt, bool], str]()

    def file(self, module: str) -> File | None:
        """None where there is no such module, or where it is no kernel's code."""
        path = module.removeprefix("attnops.").replace(".", "/")
        text = self._source(f"{path}.py") if counts(module) else None
        return None if text is None else parsed(text)

    def digest(self, starts: Iterable[Name]) -> str:
        """Of all that is reached; "" where a start is missing."""
        waiting, seen, texts = sorted(starts), set[Name](), set[str]()
        if not all(self._has(start) for start in waiting):
            return ""
        while waiting:
            wanted = waiting.pop()
            if wanted not in seen:
                seen.add(wanted)
                waiting += self._passed_on(wanted)
                for statement in self._statements(wanted):
                    texts.add(self._text(wanted.module, statement))
                    waiting += (named for _, named in self._read(wanted.module, statement))
        return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:LENGTH]

    def _has(self, wanted: Name) -> bool:
        file = self.file(wanted.module)
        return file is not None and (
            wanted.name == WHOLE or wanted.name in file.binds or wanted.name in file.imports
        )

    def _statements(self, wanted: Name) -> list[Statement]:
        file = self.file(wanted.module)
        return [
            s
            for s in (file.statements if file else ())
            if wanted.name == WHOLE or wanted.name in s.binds
        ]

    def _passed_on(self, wanted: Name) -> Iterator[Name]:
        """What a module imports under a name; all of the module where it has no such name."""
        file = self.file(wanted.module)
        if file is not None and not self._has(wanted):
            yield Name(wanted.module, WHOLE)
        for imported in file.imports.get(wanted.name, ()) if file else ():
            yield from (named for _, named in self._imported(imported, wanted.name, {WHOLE}))

    def _read(self, module: str, statement: Statement) -> Iterator[tuple[str, Name]]:
        """Whom a statement names, by the text of the use, as `f` or `data.f`."""
        file = self.file(module)
        if file is None:
            return
        for name, attributes in statement.uses.items():
            if name in file.binds:
                yield name, Name(module, name)
            for imported in (*statement.imports.get(name, ()), *file.imports.get(name, ())):
                yield from self._imported(imported, name, attributes)
        # A star may bring any name.
        for imported in file.imports.get(WHOLE, ()):
            yield from self._imported(imported, WHOLE, ())

    def _imported(
        self, imported: Imported, name: str, attributes: Iterable[str]
    ) -> Iterator[tuple[str, Name]]:
        module, member = imported
        inner = f"{module}.{member}" if member else module
        if member and self._has(Name(module, member)):
            yield name, Name(module, member)
        elif self.file(inner) is not None:
            yield from ((f"{name}.{attribute}", Name(inner, attribute)) for attribute in attributes)
        elif self.file(module) is not None:
            yield name, Name(module, WHOLE)

    def _text(self, module: str, statement: Statement, whole: bool = True) -> str:
        """A digest of a statement, in which what a name names stands in place of the alias: its own
        name and, if `whole`, its text."""
        key = statement.node, whole
        if key not in self._texts:
            called = {
                alias: self._called(named, whole)
                for alias, named in self._aliases(module, statement).items()
            }
            self._texts[key] = hashlib.sha256(shown(statement.node, called).encode()).hexdigest()
        return self._texts[key]

    def _called(self, named: Name, whole: bool) -> str:
        texts = (
            sorted({self._text(named.module, s, whole=False) for s in self._statements(named)})
            if whole
            else []
        )
        return " ".join([named.name, *texts])

    def _aliases(self, module: str, statement: Statement) -> dict[str, Name]:
        """The texts of uses that name one thing, wherever they stand in the statement."""
        found = defaultdict[str, set[Name]](set)
        for text, named in self._read(module, statement):
            if text.partition(".")[0] not in statement.hidden:
                found[text] |= self._defined(named)
        return {text: names.pop() for text, names in found.items() if len(names) == 1}

    def _defined(self, named: Name) -> set[Name]:
        """Where a name is defined that modules may pass on."""
        file = self.file(named.module)
        if file is None or named.name in file.binds:
            return {named}
        imported = (
            one
            for i in file.imports.get(named.name, ())
            for one in self._imported(i, named.name, {WHOLE})
        )
        return {name for _, one in imported for name in self._defined(one)}
