"""Every way PyTorch compiles a model: dynamic shapes, export, AOTInductor. `test_choose.py` has
torch.compile's modes."""

import runpy
import subprocess

import pytest
import torch
from torch._dynamo.utils import counters

from tests.helpers import ROOT
from tests.lowering.models import HQ, D, Dense, code_of, compiled_code, kernel_calls


def test_sizes_that_change_keep_one_graph_and_the_kernel():
    model, x, graphs = Dense().eval(), torch.randn(2, 8, HQ * D), []
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    _, code = compiled_code(lambda: compiled(x))
    assert kernel_calls(code) == ["attention.sdpa"]
    for batch, tokens in [(2, 8), (3, 8), (2, 31), (5, 17)]:
        x = torch.randn(batch, tokens, HQ * D)
        torch.testing.assert_close(compiled(x), model(x))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]


def test_export_keeps_the_op_and_compiles_to_the_kernel():
    model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
    program = torch.export.export(
        model, (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=64)},)
    )
    assert sum(n.target is torch.ops.attnops.attention.default for n in program.graph.nodes) == 1
    longer = torch.randn(2, 20, HQ * D)
    torch.testing.assert_close(program.run_decompositions().module()(longer), model(longer))
    assert kernel_calls(code_of(program.module(), x)) == ["attention.sdpa"]


EXAMPLE = runpy.run_path(str(ROOT / "examples" / "aoti_export.py"))


@pytest.mark.slow
def test_aot_inductor_packages_the_kernel(tmp_path, capsys):
    """A kernel that is called by its name, one that is lowered in place as what it is made of;
    loaded by another process."""
    try:
        EXAMPLE["main"](str(tmp_path / "model.pt2"))
    except subprocess.CalledProcessError as error:
        if error.returncode < 0 and crashes(
            torch.nn.Linear(64, 8), torch.randn(2, 64), str(tmp_path / "linear.pt2")
        ):
            pytest.skip(
                f"torch {torch.__version__} cannot load a package of one linear layer here: "
                f"signal {-error.returncode}"
            )
        raise
    assert capsys.readouterr().out.splitlines()[-1] == "another process gives what the model gives"


def crashes(model, given, path):
    EXAMPLE["export"](model, given, path)
    try:
        EXAMPLE["run_elsewhere"](path, given)
    except subprocess.CalledProcessError as error:
        return error.returncode < 0
    return False
