"""Nobody imports upward: every module has a rank and imports only its own rank or below.

The ranks are those of docs/architecture.md. The tests read the source, so an import inside a
function counts as well; one under ``if TYPE_CHECKING:`` does not.
"""

import ast
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

from tests.helpers import runtime_nodes, sources

# A module has the rank of its longest prefix here. The front, `attnops` itself, stands above all
# that it offers.
RANKS = {
    "attnops.core": 0,
    "attnops.measured": 0,
    "attnops.errors": 0,
    "attnops.on_import": 0,
    "attnops.tried": 0,
    "attnops.version": 0,
    "attnops.kernels": 1,
    "attnops.ops": 2,
    "attnops.lowering": 3,
    "attnops.graphs": 3,
    "attnops.nn": 3,
    "attnops.cache": 3,
    "attnops.testing": 3,
    "attnops.adapters": 4,
    "attnops.announce": 4,
    "attnops.hf": 4,
    "attnops.configs": 4,
    "attnops.tune": 5,
    "attnops.bench": 5,
    "attnops.cli": 5,
    "attnops.__main__": 5,
}
OF_FAMILIES = ("reference", "_format", "bound")
"""How the names of a family's modules end that rank with the core."""
FRONT = 5
DYNAMIC = ("import_module", "__import__")

# Same rank or below, and still forbidden: (who, whom).
STRANGERS = [
    ("attnops.lowering", "attnops.graphs"),
    ("attnops.graphs", "attnops.lowering"),
    ("attnops.kernels", "attnops.core.select"),
    ("attnops.core", "attnops.ops"),
    *(
        (f"attnops.hf.{lower}", f"attnops.hf.{upper}")
        for lower, upper in combinations(("models", "cache", "attention", "steps"), 2)
    ),
]


LINKED = ("attnops.lowering", "attnops.graphs")
BACKENDS, SHARED = "attnops.kernels", "shared"
"""A module of a backend's folder imports no other backend, and what is shared imports none. A
kernel of two stands beside the folders."""


def within(module, package):
    packages = (package,) if isinstance(package, str) else package
    return module in packages or module.startswith(tuple(p + "." for p in packages))


def rank(module):
    if module == "attnops":
        return FRONT
    if module.startswith("attnops.ops.") and module.endswith(OF_FAMILIES):
        return 0
    return max(
        ((len(prefix), r) for prefix, r in RANKS.items() if within(module, prefix)),
        default=(0, None),
    )[1]


def imports(tree, modules, importer="attnops"):
    """The modules of this project that the syntax tree of `importer` imports when it runs."""
    package = (
        importer
        if f"{importer}." in {name[: len(importer) + 1] for name in modules}
        else importer.rpartition(".")[0]
    )
    for node in runtime_nodes(tree):
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names]
            case ast.ImportFrom(module=module, level=level, names=names):
                parts = package.split(".")[: 1 - level or None] if level else []
                module = ".".join([*parts, *([module] if module else [])])
                found = [
                    full if (full := f"{module}.{name.name}") in modules else module
                    for name in names
                ]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
                function
            ).endswith(DYNAMIC):
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
    if (
        (own := backend(module))
        and within(target, BACKENDS)
        and target != BACKENDS
        and backend(target) not in (SHARED, own)
    ):
        return f"{module} imports {target}: it may import {SHARED} and its own folder"
    return None


def backend(module):
    """The folder of a kernel's module; "" for a module of another place."""
    parts = module.removeprefix(f"{BACKENDS}.").split(".")
    return (
        parts[0]
        if within(module, BACKENDS)
        and sources().get(f"{BACKENDS}.{parts[0]}", Path()).name == "__init__.py"
        else ""
    )


def test_every_module_has_a_rank():
    unknown = [module for module in sources() if rank(module) is None]
    assert not unknown, (
        f"say in tests/test_layers.py and docs/architecture.md where these stand: {unknown}"
    )


@pytest.fixture(scope="module")
def trees():
    """The syntax tree of every module."""
    return {module: ast.parse(path.read_text()) for module, path in sources().items()}


def test_nobody_imports_upward(trees):
    found = [
        (module, target)
        for module, tree in trees.items()
        for target in imports(tree, sources(), module)
    ]
    assert not [text for pair in found if (text := wrong(*pair))]


def test_no_circle_below_the_ops(trees):
    """Imports inside functions count, and an import of a module runs its packages, but for those
    that hold the importer."""
    modules = {
        m: path
        for m, path in sources().items()
        if (own := rank(m)) is not None and own < RANKS["attnops.ops"]
    }
    graph = {
        m: {t for t in imports(trees[m], modules, m) if t in modules and t != m} for m in modules
    }
    for module, targets in graph.items():
        packages = {".".join(t.split(".")[:n]) for t in targets for n in range(1, t.count(".") + 1)}
        targets |= {p for p in packages if p in modules and not within(module, p)}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_imports_are_relative_in_the_linked_folders_alone(trees):
    """There they make a bare `import graphs` fail; the same modules twice would register every op
    twice."""
    found = []
    for module, tree in trees.items():
        linked = within(module, LINKED)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                wrong = not node.level and within(node.module, "attnops") if linked else node.level
            else:
                names = node.names if isinstance(node, ast.Import) else []
                wrong = linked and any(within(name.name, "attnops") for name in names)
            if wrong:
                found.append(f"{module}:{node.lineno}")
    assert not found


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("attnops.core.problem", "def f():\n    from attnops.kernels import load_own"),
        ("attnops.core.problem", "from attnops.ops.attention.reference import attend"),
        ("attnops.kernels.sgl.flashmla", "from attnops.kernels.triton.launch.data import write_kv"),
        ("attnops.kernels.shared.parts", "from attnops.kernels import fa3_triton"),
        ("attnops.lowering.choose", "from attnops import graphs"),
        (
            "attnops.graphs.split",
            "from importlib import import_module\nimport_module('attnops.lowering.choose')",
        ),
        ("attnops.graphs.split", "from .. import lowering"),
    ],
)
def test_the_check_sees(module, code):
    modules = {*sources(), "attnops.ops", "attnops.graphs"}
    assert [target for target in imports(ast.parse(code), modules, module) if wrong(module, target)]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("attnops.core.kernel", "if TYPE_CHECKING:\n    from attnops.core.select import Policy"),
        (
            "attnops.lowering.choose",
            "from ..core.select import select\nfrom .cache_key import circumstances",
        ),
        (
            "attnops.kernels.fa3_triton",
            "from attnops.kernels.sgl import fa3\nfrom attnops.kernels.triton import attention",
        ),
    ],
)
def test_the_check_lets_pass(module, code):
    assert not [
        target
        for target in imports(ast.parse(code), set(sources()), module)
        if wrong(module, target)
    ]
