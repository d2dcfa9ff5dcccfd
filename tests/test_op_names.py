"""An op carries its facts: outside its family no code asks for an op by its name."""

import ast

import pytest

from attnops.ops import OPS
from tests.helpers import sources

ROOMS = ("core", "measured", "tune", "bench", "cli", "testing", "lowering", "graphs")

# Suites of the benchmark, a demo and passes have ops of their own, and configs a field of this name. The others name ops still.
NAMED = {
    "attnops.bench.decode",
    "attnops.bench.engines",
    "attnops.bench.ops",
    "attnops.bench.run",
    "attnops.cli.demo",
    "attnops.configs",
    "attnops.lowering.fuse_norm_linear_pass",
    "attnops.lowering.fuse_rotation_pass",
    "attnops.lowering.linear_parts",
}


def looked_at():
    """The modules of ROOMS, and the single files beside them."""
    rooms = tuple(f"attnops.{room}" for room in ROOMS)
    found = {}
    for module, path in sources().items():
        single = module.count(".") == 1 and path.name != "__init__.py"
        if single or module in rooms or module.startswith(tuple(room + "." for room in rooms)):
            found[module] = path
    return found


def named(path):
    """The ops that a file's string constants name."""
    constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in OPS}


@pytest.mark.parametrize("module", looked_at())
def test_no_op_is_asked_for_by_name(module):
    found = named(looked_at()[module])
    if module in NAMED:
        assert found, f"{module} names no op any more: take it out of the list"
    else:
        assert not found, f"{module} names {sorted(found)}: say it on the op or on its record"
