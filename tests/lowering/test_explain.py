"""`explain` tells what would be called where, and why nothing else, on any machine."""

import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import attnops
from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
from attnops.core.problem import pretended
from tests.helpers import fresh_process
from tests.lowering.models import HQ, D, Dense, PagedModel, decode


def test_table_of_a_model_for_another_machine(capsys):
    model = nn.Sequential(Dense(), Dense(), Dense(5.0)).eval()
    explanation = attnops.explain(model, torch.randn(2, 8, HQ * D), target="sm90")
    assert capsys.readouterr().out.strip() == str(explanation).strip()
    assert explanation.chosen() == ("attention.sdpa", "attention.triton")
    assert [site.count for site in explanation.sites] == [2, 1]
    for site in explanation.sites:
        named = {site.decision.kernel.name, *site.decision.passed_over, *site.decision.refused}
        assert named == set(kernels_of("attention")), "every declared kernel is named"
    data = json.loads(json.dumps(explanation.as_dict()))
    assert data["target"] == "sm90" and data["calls"][0]["kernel"] == "sdpa"


def test_nothing_is_run_or_written_and_the_target_ends_with_the_call():
    model, given = PagedModel(1).eval(), decode()
    model.layers[0].k_pages.fill_(7.0)
    assert "paged_attention.sdpa" in attnops.explain(model, *given, quiet=True).chosen()
    assert (model.layers[0].k_pages == 7.0).all()
    with pytest.raises(ZeroDivisionError):
        attnops.explain(lambda: 1 // 0, target="sm90", quiet=True)
    assert pretended() is None


def test_compiled_modules_and_functions_are_explained_as_their_own_selves():
    model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
    chosen = {
        attnops.explain(each, x, target="sm90", quiet=True).chosen()
        for each in (model, torch.compile(model))
    }
    model.compile()
    assert chosen == {attnops.explain(model, x, target="sm90", quiet=True).chosen()}
    with FakeTensorMode():
        q = torch.empty(1, 128, 32, 128, dtype=torch.bfloat16)
    [site] = attnops.explain(
        lambda q: attnops.attention(q, q, q, causal=True), q, target="sm90", quiet=True
    ).sites
    assert site.where == "(function)" and site.decision.problem.dtype is torch.bfloat16


@pytest.mark.parametrize("target", ["h1000", "sm", "gpu", "", 90])
def test_unknown_targets(target):
    with pytest.raises(InvalidInput, match="target: got"):
        attnops.explain(lambda: None, target=target)
    with pytest.raises(InvalidInput, match="assume: got"):
        attnops.explain(lambda: None, assume=("flashinfer",))  # without a target


@pytest.mark.full
def test_torch_logs_shows_decisions():
    code = (
        "import sys\n"
        "sys.stderr = sys.stdout\n"
        "import torch, attnops\n"
        "q = torch.randn(1, 4, 2, 8)\n"
        "torch.compile(lambda q: attnops.attention(q, q, q))(q)\n"
    )
    # No lowering runs on a cache hit, so there would be nothing to log.
    env = {
        "TORCH_LOGS": "attnops",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }
    assert "attention on cpu -> sdpa" in fresh_process(code, env=env)
