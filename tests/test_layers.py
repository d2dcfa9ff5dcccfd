"""Nobody imports upward: every module has a rank and imports only its own rank or below.

The ranks are those of docs/architecture.md. The tests read the source, so an import inside a function counts as well;
one under ``if TYPE_CHECKING:`` does not.
"""

import ast

import pytest

from tests.helpers import runtime_nodes, sources

# A module has the rank of its longest prefix here. The front, `attnops` itself, stands above all that it offers.
RANKS = {
    "attnops.problem": 0,
    "attnops.errors": 0,
    "attnops.env": 0,
    "attnops.version": 0,
    "attnops.traced": 0,
    "attnops.versions": 0,
    "attnops.reference": 0,
    "attnops.package": 1,
    "attnops.promises": 1,
    "attnops.kernel": 1,
    "attnops.needs": 1,
    "attnops.measured": 1,
    "attnops.select": 2,
    "attnops.kernels": 2,
    "attnops.ops": 3,
    "attnops.lowering": 4,
    "attnops.graphs": 4,
    "attnops.nn": 4,
    "attnops.cache": 4,
    "attnops.inputs": 4,
    "attnops.testing": 4,
    "attnops.hf": 5,
    "attnops.shapes": 5,
    "attnops.configs": 5,
    "attnops.tune": 5,
    "attnops.bench": 5,
    "attnops.cli": 6,
    "attnops.__main__": 6,
}
FRONT = 6
DYNAMIC = ("import_module", "__import__")

# Same rank or below, and still forbidden: (who, whom).
STRANGERS = [
    ("attnops.tune", "attnops.testing"),
    ("attnops.lowering", "attnops.graphs"),
    ("attnops.graphs", "attnops.lowering"),
    ("attnops.kernels", "attnops.select"),
    ("attnops.kernels", "attnops.ops"),
]


def within(module, package):
    return module == package or module.startswith(package + ".")


def rank(module):
    if module == "attnops":
        return FRONT
    return max(((len(prefix), r) for prefix, r in RANKS.items() if within(module, prefix)), default=(0, None))[1]


def imports(tree, modules):
    """The modules of this project that a syntax tree imports when it runs."""
    for node in runtime_nodes(tree):
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names]
            case ast.ImportFrom(module=str(module), level=0, names=names):
                found = [full if (full := f"{module}.{name.name}") in modules else module for name in names]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(function).endswith(DYNAMIC):
                found = [name]
            case _:
                continue
        yield from (name for name in found if within(name, "attnops"))


def wrong(module, target):
    """Why this import may not be, or None."""
    if (low := rank(module)) is not None and (high := rank(target)) is not None and high > low:
        return f"{module} (rank {low}) imports {target} (rank {high})"
    if any(within(module, who) and within(target, whom) for who, whom in STRANGERS):
        return f"{module} imports {target}: the two may not know each other"
    return None


def test_every_module_has_a_rank():
    unknown = [module for module in sources() if rank(module) is None]
    assert not unknown, f"say in tests/test_layers.py and docs/architecture.md where these stand: {unknown}"


def test_nobody_imports_upward():
    found = [(module, target) for module, path in sources().items() for target in imports(ast.parse(path.read_text()), sources())]
    assert not [text for pair in found if (text := wrong(*pair))]


def test_imports_are_absolute():
    relative = [
        f"{path}:{node.lineno}"
        for path in sources().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("attnops.kernel", "import attnops.lowering"),
        ("attnops.problem", "def f():\n    from attnops.kernel import Kernel"),
        ("attnops.kernels.sdpa", "from attnops import ops"),
        ("attnops.kernels.sdpa", "from attnops.select import Policy"),
        ("attnops.lowering.choose", "from attnops import graphs"),
        ("attnops.graphs.split", "from importlib import import_module\nimport_module('attnops.lowering.choose')"),
        ("attnops.ops.dense", "import attnops"),
    ],
)
def test_the_check_sees(module, code):
    modules = {*sources(), "attnops.ops", "attnops.graphs"}
    assert [target for target in imports(ast.parse(code), modules) if wrong(module, target)]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("attnops.kernel", "if TYPE_CHECKING:\n    from attnops.select import Policy"),
        ("attnops.lowering.choose", "from attnops.select import select\nfrom attnops.ops import dense"),
        ("attnops.cli.doctor", "import attnops"),
        ("attnops", "def __getattr__(name):\n    from attnops.hf import patch"),
    ],
)
def test_the_check_lets_pass(module, code):
    assert not [target for target in imports(ast.parse(code), set(sources())) if wrong(module, target)]
