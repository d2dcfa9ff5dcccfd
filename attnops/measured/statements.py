"""The statements of a file: what each binds, which names it uses, and its text without what says
nothing."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

WHOLE = "*"
"""In place of a name: all statements of a module. In place of an attribute: a name that stands by
itself."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)


class Name(NamedTuple):
    """A name of a module's top level, or WHOLE."""

    module: str
    name: str


class Imported(NamedTuple):
    """What an import binds: a member of a module; WHOLE of it where nothing follows the name; "" is
    the module as an object."""

    module: str
    member: str


Imports = Mapping[str, tuple[Imported, ...]]
"""By the name that they bind."""


@dataclass(frozen=True)
class Statement:
    """A statement of a module's top level.

    binds: the names that it defines, or whose objects it changes, as `TABLE[key] = value` does.
    uses: by a name of the module's, the attributes that it reads of it, and WHOLE where the name
    stands by itself.
    hidden: the names that a scope inside of it binds, so that not each of them is the module's.
    imports: those of its functions.
    """

    node: ast.stmt
    binds: frozenset[str]
    uses: Mapping[str, frozenset[str]]
    hidden: frozenset[str]
    imports: Imports

    def holds(self, line: int) -> bool:
        """Does a line of the file, from 1, belong to it, decorators included?"""
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])
        first = min([self.node.lineno, *(one.lineno for one in decorators)])
        return first <= line <= (self.node.end_lineno or first)


@dataclass(frozen=True)
class File:
    """The statements of a module, and what its top level imports."""

    statements: tuple[Statement, ...]
    imports: Imports

    @functools.cached_property
    def binds(self) -> frozenset[str]:
        """What its statements do."""
        return frozenset(name for statement in self.statements for name in statement.binds)


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> File:
    """A file's statements, without docstrings, imports, and blocks that hold no more than
    imports."""
    tree = ast.parse(text)
    nodes = [node for node in tree.body if not _says_nothing(node)]
    stored = {name for node in nodes for name in (*_stored([node]), *_declared(node))}
    at_top = (node for node in tree.body if not isinstance(node, DEFINITIONS))
    return File(tuple(_statement(node, stored) for node in nodes), _imports(at_top))


def _says_nothing(node: ast.stmt) -> bool:
    return (
        isinstance(node, IMPORTS)
        or _is_text(node)
        or (isinstance(node, ast.If) and all(map(_says_nothing, [*node.body, *node.orelse])))
    )


def _statement(node: ast.stmt, stored: Iterable[str]) -> Statement:
    binds = {*_stored([node]), *_declared(node), *({*_changed(node)} & {*stored})}
    uses = defaultdict[str, set[str]](set)
    for name, attribute in _free(node):
        uses[name].add(attribute)
    inside = _imports([node]) if isinstance(node, DEFINITIONS) else {}
    return Statement(
        node,
        frozenset(binds),
        {n: frozenset(a) for n, a in uses.items()},
        frozenset(_hidden(node)),
        inside,
    )


def _imports(nodes: Iterable[ast.AST]) -> Imports:
    found = defaultdict[str, list[Imported]](list)
    for node in nodes:
        for inner in ast.walk(node):
            for name, imported in _imported(inner):
                found[name].append(imported)
    return {name: tuple(every) for name, every in found.items()}


def _imported(node: ast.AST) -> Iterator[tuple[str, Imported]]:
    """The names that an absolute import binds."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, Imported(node.module, alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield name, Imported(alias.name, "" if alias.asname else WHOLE)


# Scopes -------------------------------------------------------------------------------------------


def _scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of the scopes inside of it."""
    for node in nodes:
        yield node
        if not isinstance(node, (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)):
            yield from _scope(ast.iter_child_nodes(node))


def _stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that the nodes of a scope bind, imports apart."""
    for node in _scope(nodes):
        yield from _binding(node)


def _binding(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif (
        isinstance(node, (*DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar))
        and node.name
    ):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg


def _hidden(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        yield from _binding(inner)


def _declared(node: ast.AST) -> Iterator[str]:
    """What functions declare as `global`, and may set."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Global):
            yield from inner.names


def _changed(node: ast.stmt) -> Iterator[str]:
    """The names whose objects a statement changes: by `x[i] = y`, by `x.a = y`, or by `x.method(y)`
    alone on its line."""
    for inner in _scope([node]):
        target = (
            inner.value.func
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call)
            else inner
        )
        written = target is not inner or not isinstance(getattr(inner, "ctx", ast.Load()), ast.Load)
        if written and isinstance(target, (ast.Attribute, ast.Subscript)):
            while isinstance(target, (ast.Attribute, ast.Subscript, ast.Call)):
                target = target.func if isinstance(target, ast.Call) else target.value
            if isinstance(target, ast.Name):
                yield target.id


def _free(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that a node takes from the scopes around it, with the attribute that is read of
    each."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield node.value.id, node.attr
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load):
            yield node.id, WHOLE
    elif isinstance(node, FUNCTIONS):
        yield from _free_of(node, *_of_function(node))
    elif isinstance(node, COMPREHENSIONS):
        own = {*_stored(generator.target for generator in node.generators)}
        yield from _free_of(node, ast.iter_child_nodes(node), own)
        yield from _free(node.generators[0].iter)
    else:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, WHOLE
        yield from _free_of(node, (), ())


def _of_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
) -> tuple[list[ast.AST], set[str]]:
    """The body of a function, and the names that are its own there."""
    body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else [*node.body]
    arguments = (inner for inner in ast.walk(node.args) if isinstance(inner, ast.arg))
    declared = {
        name
        for inner in _scope(body)
        if isinstance(inner, (ast.Global, ast.Nonlocal))
        for name in inner.names
    }
    return body, ({*_stored(arguments)} | {*_stored(body)}) - declared


def _free_of(
    node: ast.AST, inside: Iterable[ast.AST], own: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Of a node's children; those `inside` know the node's `own` names."""
    within, hides = {*map(id, inside)}, {*own}
    for child in ast.iter_child_nodes(node):
        for name, attribute in _free(child):
            if id(child) not in within or name not in hides:
                yield name, attribute


# The text of a statement --------------------------------------------------------------------------


def shown(node: ast.AST, called: Mapping[str, str]) -> str:
    """A node as text that is the same in every version of Python; "" for one that says nothing.

    called: what stands in place of names and attributes, as `f` or `data.f`.
    """
    if isinstance(node, IMPORTS) or _is_text(node):
        return ""
    if (name := _dotted(node)) in called:
        return f"Name({called[name]})"
    return f"{type(node).__name__}({','.join(_fields(node, called))})"


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.AST) -> bool:
    """Is it a docstring, of a constant, too?"""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _fields(node: ast.AST, called: Mapping[str, str]) -> Iterator[str]:
    # Fields that a later Python adds are empty in older code.
    for name, value in ast.iter_fields(node):
        text = _value(value, called)
        if name not in ("ctx", "kind", "type_comment") and text:
            yield f"{name}={text}"


def _value(value: Any, called: Mapping[str, str]) -> str:
    if isinstance(value, ast.AST):
        return shown(value, called)
    if isinstance(value, list):
        return ";".join(filter(None, (_value(one, called) for one in value)))
    return "" if value is None else repr(value)
