"""Every way PyTorch compiles a model: modes, dynamic shapes, export, AOTInductor."""

import runpy
import subprocess

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._dynamo.utils import counters

from tests.helpers import ROOT
from tests.lowering.models import HQ, D, Dense, PagedModel, Step, compiled_code, decode, kernel_calls


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes(mode):
    model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
    with torch.no_grad():
        got, code = compiled_code(lambda: torch.compile(model, mode=mode, fullgraph=True)(x))
        torch.testing.assert_close(got, model(x))
    assert kernel_calls(code) == ["attention.sdpa"]


def test_dynamic_through_inductor_keeps_one_graph_and_the_kernel():
    model = Dense().eval()
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    with torch.no_grad():
        x = torch.randn(2, 8, HQ * D)
        _, code = compiled_code(lambda: compiled(x))
        assert kernel_calls(code) == ["attention.sdpa"]
        graphs = counters["stats"]["unique_graphs"]
        for batch, tokens in [(3, 8), (2, 31), (5, 17), (4, 64)]:
            x = torch.randn(batch, tokens, HQ * D)
            torch.testing.assert_close(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] == graphs


def test_marked_batch_of_a_paged_decode_compiles_once():
    backend = EagerAndRecordGraphs()
    model = PagedModel(2).eval()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for batch in (2, 3, 7, 5):
            step = decode()
            rows = torch.arange(batch)
            table = torch.stack([rows + 1, rows + 8], 1).to(torch.int32)
            step = Step(
                torch.randn(batch, HQ * D), table, torch.full((batch,), 3, dtype=torch.int32),
                torch.ones(batch, dtype=torch.int32), torch.full((batch,), 2), 1,
            )  # fmt: skip
            for tensor in step[:5]:
                torch._dynamo.mark_dynamic(tensor, 0)
            torch.testing.assert_close(compiled(*step), model(*step))
    assert len(backend.graphs) == 1


def test_export_keeps_the_op_and_compiles_to_the_kernel():
    model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=64)},))
        assert sum(n.target is torch.ops.attnops.attention.default for n in program.graph.nodes) == 1
        longer = torch.randn(2, 20, HQ * D)
        torch.testing.assert_close(program.run_decompositions().module()(longer), model(longer))
        got, code = compiled_code(lambda: torch.compile(program.module())(x))
        torch.testing.assert_close(got, model(x))
    assert kernel_calls(code) == ["attention.sdpa"]


EXAMPLE = runpy.run_path(str(ROOT / "examples" / "aoti_export.py"))


@pytest.mark.slow
def test_aot_inductor_packages_the_kernel(tmp_path, capsys):
    """A kernel that is called by its name, one that is lowered in place as what it is made of; loaded by another process."""
    try:
        EXAMPLE["main"](str(tmp_path / "model.pt2"))
    except subprocess.CalledProcessError as error:
        if error.returncode < 0 and crashes(torch.nn.Linear(64, 8), torch.randn(2, 64), str(tmp_path / "linear.pt2")):
            pytest.skip(f"torch {torch.__version__} cannot load a package of one linear layer here: signal {-error.returncode}")
        raise
    assert capsys.readouterr().out.splitlines()[-1] == "another process gives what the model gives"


def crashes(model, given, path):
    EXAMPLE["export"](model, given, path)
    try:
        EXAMPLE["run_elsewhere"](path, given)
    except subprocess.CalledProcessError as error:
        return error.returncode < 0
    return False
