"""The site of the docs: every public name has an entry in the API reference, and links and
inventories name what is there."""

import ast
import importlib
import inspect
import pydoc
import re
from pathlib import Path

import pytest

import attnops
from tests.helpers import ROOT

API = ROOT / "docs" / "api"
ROOMS = [
    "attnops",
    *sorted(f"attnops.{n}" for n in dir(attnops) if inspect.ismodule(getattr(attnops, n))),
    "attnops.core.kernel",
    "attnops.measured",
]
INVENTORIES = sorted((ROOT / "docs" / "inventories").glob("*.inv"))


def public_names(room):
    """`__all__`, or what a package exports as a name of its own (`import x as x`), or the errors of
    `attnops.core.errors`."""
    module = importlib.import_module(room)
    if room == "attnops":
        return [n for n in dir(module) if not inspect.ismodule(getattr(module, n))]
    if hasattr(module, "__all__"):
        return module.__all__
    home = importlib.import_module("attnops.core.errors") if room == "attnops.errors" else module
    tree = ast.parse(Path(home.__file__).read_text())
    exported = [
        a.asname
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
        if a.asname == a.name
    ]
    names = [*exported, *(n.name for n in tree.body if isinstance(n, ast.ClassDef))]
    return [n for n in names if not inspect.ismodule(getattr(module, n))]


def entries():
    """The dotted names that directives of docs/api and of the ops' page document."""
    pages = "\n".join(page.read_text() for page in (*API.glob("*.md"), API.parent / "ops.md"))
    return set(re.findall(r"^\.\. (?:auto\w+|py:\w+):: ([\w.]+)", pages, re.M))


def without_entry(room, documented):
    """Public names of a room that have no entry, neither there nor where the same class or function
    is an entry of another room."""
    objects = {id(found) for name in documented if callable(found := pydoc.locate(name))}
    module = importlib.import_module(room)
    return [
        n
        for n in public_names(room)
        if f"{room}.{n}" not in documented and id(getattr(module, n)) not in objects
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_entry(room):
    assert (API / f"{room.rpartition('.')[2]}.md").exists()
    assert len(public_names(room)) >= 2
    assert without_entry(room, entries()) == []


def test_every_entry_is_there():
    owners = {name: pydoc.locate(name.rpartition(".")[0]) for name in entries()}
    assert [
        name for name, owner in owners.items() if not hasattr(owner, name.rpartition(".")[2])
    ] == []


@pytest.mark.parametrize("inventory", INVENTORIES, ids=lambda p: p.stem)
def test_inventories_name_what_is_there(inventory):
    form, project, _, *rows = inventory.read_text().splitlines()
    assert form == "# Sphinx inventory version 1" and project == f"# Project: {inventory.stem}"
    for name, kind, page in map(str.split, rows):
        found = pydoc.locate(name)
        assert name == "None" or (
            found is not None and kind in ("class", "data", "exception", "function")
        ), name
        assert not page.startswith("/") and "#" not in page
