"""`import attnops` needs torch alone, touches no device, is light, and reads its two switches in
one place."""

import ast
import json
import re

import pytest

from tests.helpers import ROOT, fresh_process, ready_process, runtime_nodes, sources, torch_process

OPTIONAL = [
    "triton",
    "transformers",
    "flashinfer",
    "sgl_kernel",
    "flash_attn",
    "typer",
    "rich",
    "numpy",
]
LATER = ["bench", "cli", "graphs", "hf", "nn", "testing", "tune"]
"""Rooms that are loaded when something of them is asked for."""
SWITCHES = 2


def test_torch_alone_is_enough():
    fresh_process("import attnops", block=OPTIONAL)


def test_a_blocked_module_looks_absent():
    code = """
from importlib.util import find_spec
assert find_spec("rich") is None
try:
    import rich.table
except ModuleNotFoundError as e:
    print(e.name)
"""
    assert fresh_process(code, block=["rich"]).strip() == "rich"
    with pytest.raises(AssertionError, match="NameError"):
        fresh_process("no_such_name")


def test_import_is_light():
    """What it costs beyond torch: modules of attnops alone, of these no room that a user may not
    need, and no device. It prints nothing."""
    # Ops refuse nested tensors by their class, which torch imports itself up to 2.14.
    code = """
import json, sys, torch, torch.nested._internal.nested_tensor
before = {*sys.modules}
import attnops
print(json.dumps([*({*sys.modules} - before)]))
import attnops.kernels.triton.attention
print(json.dumps(["triton" in sys.modules, torch.cuda.is_initialized()]))
"""
    loaded, later = map(json.loads, torch_process(code).splitlines())
    assert not [name for name in loaded if name.partition(".")[0] != "attnops"], (
        "whatever is installed"
    )
    assert not [name for name in loaded if name.split(".")[1:2] and name.split(".")[1] in LATER]
    assert "attnops.core.needs" in loaded and later == [False, False]


def test_every_public_name_is_reachable_after_the_import():
    """Rooms included, each on first use, and `dir` shows them all."""
    code = """
import attnops, sys
names = dir(attnops)
assert {"cache", "graphs", "hf", "lowering", "nn", "testing", "patch", "explain", "attention", "__version__"} <= set(names)
assert not [name for name in names if name.startswith("_") and name != "__version__"]
assert "attnops.nn" not in sys.modules and "attnops.testing" not in sys.modules
for name in names:
    getattr(attnops, name)
try:
    attnops.nonsense
except AttributeError as e:
    print(e)
"""  # noqa: E501
    assert "has no attribute 'nonsense'" in ready_process(code)


def test_a_bare_name_is_refused():
    code = """
for folder in ("lowering", "graphs"):
    try:
        __import__(folder)
    except ImportError as e:
        print(e)
    __import__(f"attnops.{folder}")
"""
    assert torch_process(code).count("attempted relative import beyond top-level package") == 2


def reads_environment(tree):
    """The lines where a syntax tree reaches for environment variables."""
    for node in runtime_nodes(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv"):
                yield node.lineno
            case ast.ImportFrom(module="os", names=names) if {name.name for name in names} & {
                "environ",
                "environb",
                "getenv",
            }:
                yield node.lineno


def test_one_file_reads_the_environment():
    found = {
        module: lines
        for module, path in sources().items()
        if (lines := list(reads_environment(ast.parse(path.read_text()))))
    }
    found.pop("attnops.measured.store", None)
    assert not found


def test_variables_of_other_packages_are_known():
    """Where they keep files, for which GPUs, and how many processes share a machine."""
    found = {
        name
        for path in sources().values()
        for name in re.findall(r"foreign_variable\((.*?)\)", path.read_text())
    }
    own = "name: str"
    others = "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_CUDA_ARCH_LIST", "LOCAL_WORLD_SIZE"
    assert found == {own, *map('"{}"'.format, others)}


def test_there_are_at_most_two_switches():
    text = (ROOT / "attnops" / "measured" / "store.py").read_text()
    assert len({*re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]+)"', text)}) <= SWITCHES


@pytest.mark.parametrize(
    "code",
    [
        "os.environ['X']",
        "os.getenv('X')",
        "from os import environ",
        "def f():\n    from os import getenv",
    ],
)
def test_the_check_sees(code):
    assert list(reads_environment(ast.parse(code)))
