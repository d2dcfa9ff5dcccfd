"""An op carries its facts: outside its family no code asks for an op, or for an argument, by its
name."""

import ast

import pytest

from attnops.core.problem import LEAVES
from attnops.ops import OPS
from tests.helpers import sources

ROOMS = ("core", "measured", "tune", "bench", "cli", "testing", "lowering", "graphs")

# Suites of the benchmark, a demo and passes have ops of their own, configs a field of this name,
# and torch a function.
NAMED = {
    "attnops.bench.decode",
    "attnops.bench.engines",
    "attnops.bench.ops",
    "attnops.bench.run",
    "attnops.cli.demo",
    "attnops.configs",
    "attnops.lowering.fuse_rotated_write_pass",
    "attnops.lowering.fuse_rotation_pass",
    "attnops.lowering.linear_parts",
    "attnops.lowering.norm_parts",
    "attnops.lowering.patterns",
}

# Words that an argument has, too, and that mean something else here.
OTHER_WORDS = {
    "attnops.bench": "x joins sizes in names of cases",
    "attnops.bench.choices": "x joins sizes in names of cases",
    "attnops.bench.latent": "x joins sizes in names of cases",
    "attnops.bench.files": "results files have rows",
    "attnops.bench.run": "results files have rows, and a suite is called latent",
    "attnops.cli.app": "an option of a command is called output",
    "attnops.cli.bench": "results files have rows",
    "attnops.core.fx_effects": "torch.fx has output nodes, torch a squeeze",
    "attnops.core.problem": "x stands for hexadecimal in a format",
    "attnops.measured.table": "files of tables have a source",
    "attnops.core.traits": "a field of Built is called state",
    "attnops.graphs.inputs": "fields of a PagedBatch",
    "attnops.graphs.options": "an option of graphs is called state",
    "attnops.graphs.split": "torch.fx has output nodes, torch a squeeze",
}
# Those that do name arguments: passes, of torch's own modules and of the ops that they write, and
# the rules of attention.
NAMED_ARGUMENTS = {
    "attnops.core.tensors",
    "attnops.lowering.fuse_rotated_write_pass",
    "attnops.lowering.fused_call",
    "attnops.lowering.graph_tools",
    "attnops.lowering.linear_parts",
    "attnops.lowering.matches",
    "attnops.lowering.merge_linears_pass",
    "attnops.lowering.norm_parts",
    "attnops.lowering.patterns",
    "attnops.lowering.rotations",
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


def named(path, names=OPS):
    """The ops, or other names, that a file's string constants are."""
    constants = (
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    )
    return {value for value in constants if isinstance(value, str) and value in names}


@pytest.mark.parametrize("module", looked_at())
def test_no_op_is_asked_for_by_name(module):
    found = named(looked_at()[module])
    if module in NAMED:
        assert found, f"{module} names no op any more: take it out of the list"
    else:
        assert not found, f"{module} names {sorted(found)}: say it on the op or on its record"


ARGUMENTS = {a.name for op in OPS.values() for a in op.spec.args} - LEAVES.keys() - {"policy"}
"""Of all records. Words of a Problem are no one argument's, and every record has a policy."""


@pytest.mark.parametrize("module", looked_at())
def test_no_argument_is_asked_for_by_name(module):
    found = named(looked_at()[module], ARGUMENTS)
    if module in NAMED_ARGUMENTS | OTHER_WORDS.keys():
        assert found, f"{module} names no argument any more: take it out of the list"
    else:
        assert not found, f"{module} names {sorted(found)}: say it on the argument"
