"""`explain` tells what would be called where, and why nothing else, on any machine."""

import json
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import attnops
from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
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


def test_text():
    x = torch.randn(2, 8, HQ * D, dtype=torch.float32)
    explanation = attnops.explain(Dense(5.0).eval(), x, target="sm100", assume=(), quiet=True)
    own = re.compile(r"(?!  +not )|  +not (reference|aten_flash|sdpa):")  # kernels of torch; others come and go
    assert_expected_inline(
        "\n".join(line for line in str(explanation).splitlines() if own.match(line)),
        """\
target sm100, assuming packages: none

Dense  x1
  attention on sm100 -> flex; never run on sm100
    problem: q_heads=4 kv_heads=2 head_dim=16 v_head_dim=16 causal=True softcap=True sizes_equal=True tokens=9..16 batch=2 queries=5..8 context=5..8
    not reference: can run, on a GPU only where nothing else can; never run on sm100
    not aten_flash: dtype=float32 (wants float16 | bfloat16 (CUDA)); softcap=True (wants no)
    not sdpa: softcap=True (wants no)""",  # noqa: E501
    )


@pytest.mark.full
def test_this_machine_agrees_with_the_compiled_graph():
    from tests.lowering.models import compiled_code, kernel_calls

    model, given = PagedModel(2).eval(), decode()
    with torch.no_grad():
        explanation = attnops.explain(model, *given, quiet=True)
        _, code = compiled_code(lambda: torch.compile(model)(*given))
    assert "paged_attention.sdpa" in explanation.chosen()
    assert set(kernel_calls(code)) == {"paged_attention.sdpa"}


def test_nothing_is_run_or_written():
    model, given = PagedModel(1).eval(), decode()
    model.layers[0].k_pages.fill_(7.0)
    with torch.no_grad():
        attnops.explain(model, *given, quiet=True)
    assert (model.layers[0].k_pages == 7.0).all()


def test_compiled_modules_and_functions_are_explained_as_their_own_selves():
    model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
    direct = attnops.explain(model, x, target="sm90", quiet=True)
    assert attnops.explain(torch.compile(model), x, target="sm90", quiet=True).chosen() == direct.chosen()
    model.compile()
    assert attnops.explain(model, x, target="sm90", quiet=True).chosen() == direct.chosen()
    called = attnops.explain(lambda q: attnops.attention(q, q, q), torch.randn(1, 4, 2, 8), target="sm80", quiet=True)
    assert called.sites[0].where == "(function)"


def test_fake_and_half_inputs():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 128, 32, 128, dtype=torch.bfloat16)
    explanation = attnops.explain(lambda q: attnops.attention(q, q, q, causal=True), q, target="sm90", quiet=True)
    assert explanation.sites[0].decision.problem.dtype is torch.bfloat16


def test_as_dict_is_json():
    explanation = attnops.explain(Dense().eval(), torch.randn(2, 8, HQ * D), target="sm90", assume=(), quiet=True)
    data = json.loads(json.dumps(explanation.as_dict()))
    assert data["target"] == "sm90" and data["calls"][0]["kernel"] == "sdpa"


@pytest.mark.parametrize("target", ["h1000", "sm", "gpu", "", 90])
def test_unknown_targets(target):
    with pytest.raises(InvalidInput, match="target: got"):
        attnops.explain(lambda: None, target=target)


def test_assume_needs_a_target():
    with pytest.raises(InvalidInput, match="assume: got"):
        attnops.explain(lambda: None, assume=("flashinfer",))


def test_the_pretended_target_ends_with_the_call():
    from attnops.core.problem import pretended

    with pytest.raises(ZeroDivisionError):
        attnops.explain(lambda: 1 // 0, target="sm90", quiet=True)
    assert pretended() is None


@pytest.mark.full
def test_torch_logs_shows_decisions():
    code = (
        "import sys, torch, attnops\n"
        "sys.stderr = sys.stdout\n"
        "q = torch.randn(1, 4, 2, 8)\n"
        "torch.compile(lambda q: attnops.attention(q, q, q))(q)\n"
    )
    import os
    import subprocess
    import sys

    # No lowering runs on a cache hit, so there would be nothing to log.
    env = {**os.environ, "TORCH_LOGS": "attnops", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "attention on cpu -> sdpa" in done.stderr + done.stdout
