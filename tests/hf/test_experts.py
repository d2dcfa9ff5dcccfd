"""The experts of Hugging Face models: whose layers are taken over, that models answer as before, and which calls stay transformers' own."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attnops
from attnops.core.problem import Target, pretend
from attnops.hf import experts, tiny
from attnops.ops.experts.record import EXPERTS
from tests.hf.helpers import LIMIT, calls_of, relative
from tests.hf.test_decode_graphs import generated, how
from tests.hf.test_linears import judging
from tests.lowering.models import kernel_calls
from tests.triton.process import interpreted

SM90 = Target("cuda", 90, assume=("triton",))
IDS = torch.arange(6).view(2, 3)
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")
LAYERS = {"deepseek_v3": 1}


@pytest.fixture
def calls(monkeypatch):
    with calls_of(monkeypatch, experts, "experts") as made:
        yield made


def notes(handle):
    return [note for note in handle.report().notes if note.startswith("experts")]


@pytest.mark.parametrize("stock", experts.STOCK)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_models_answer_as_eager(family, stock, calls):
    model, n = tiny.model(family), LAYERS.get(family, 2)
    model.set_experts_implementation("eager")
    want = model(IDS).logits
    model.set_experts_implementation(stock)
    with attnops.patch(model) as handle:
        assert relative(model(IDS).logits, want) < LIMIT
        assert calls == [IDS.numel()] * n
        assert [note.startswith(f"experts of {n} of {n} layers: ") for note in notes(handle)] == [True] and repr(stock) in notes(handle)[0]
    assert model.config._experts_implementation == stock
    assert not any(experts._GATE in vars(m) for m in model.modules())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generated_code_calls_the_kernel(family):
    """With the parameters themselves, which are not copied."""
    model, (backend, code) = tiny.model(family), judging(EXPERTS)
    block, x = model.model.layers[1].mlp, torch.randn(1, 5, 64)
    want, routers = block(x), {"route": "aten"}
    with attnops.patch(model), attnops.use(kernel=routers), torch._inductor.config.patch(fx_graph_cache=False), pretend(SM90):
        got = torch.compile(block, backend=backend, fullgraph=True)(x)
    [text] = code
    assert kernel_calls(text).count("experts.triton") == 1
    assert "bmm" not in text and f"empty_strided_cpu(({block.experts.num_experts}, " not in text
    assert all(relative(a, b) < LIMIT for a, b in zip(got, want, strict=True))


@pytest.mark.full
@interpreted
def test_decode_steps_by_triton():
    model = tiny.model("qwen3_moe")
    want = generated(model, 2, 4, 2)
    others = {"linear": "aten", "paged_attention": "reference", "attention": "reference", "write_kv": "reference"}
    with attnops.use(kernel=others), pretend(SM90), attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        assert torch.equal(generated(model, 2, 4, 2), want)
        assert handle.graphs.report().whole == ""


def test_explain_of_a_config_without_weights():
    from attnops.cli.explain import explain_config

    found = explain_config(tiny.config("gpt_oss"), dtype=torch.bfloat16, target="h200", tokens=100)
    sites = {phase: [s.decision.kernel.name for s in one.sites if s.decision.problem.op == "experts"] for phase, one in found.items()}
    assert sites == {"prefill": [], "decode": ["triton"]}


# Calls that stay transformers' own ------------------------------------------------------------------------------------


def test_on_a_cpu_transformers_own_serve():
    model = tiny.model("mixtral")
    with torch.no_grad(), attnops.patch(model):
        assert not experts._serves(*layer_call(model, 3))
        with pretend(SM90):
            assert experts._serves(*layer_call(model, 3))
            with attnops.use(kernel={"experts": "aten"}):
                assert not experts._serves(*layer_call(model, 3))


def layer_call(model, tokens, **more):
    module = model.model.layers[0].mlp.experts
    return module, torch.randn(tokens, 64, **more), torch.zeros(tokens, 2, dtype=torch.int64), vars(module)[experts._GATE]


@pytest.mark.parametrize(("tokens", "served"), [(1, True), (64, True), (65, False)])
@torch.no_grad()
def test_few_tokens_alone(tokens, served):
    model = tiny.model("mixtral")
    with attnops.patch(model), pretend(SM90):
        assert experts._serves(*layer_call(model, tokens)) is served
        assert not experts._serves(*layer_call(model, tokens, dtype=torch.bfloat16)), "another dtype than the weights'"
        with torch.autocast("cpu"):
            assert not experts._serves(*layer_call(model, tokens))
        with attnops.use(deterministic=True):
            assert experts._serves(*layer_call(model, tokens))


def test_gradients(calls):
    model = tiny.model("mixtral")
    with attnops.patch(model):
        model(IDS).logits.sum().backward()
    assert not calls and model.model.layers[0].mlp.experts.down_proj.grad.abs().sum() > 0


@torch.no_grad()
def test_an_adapter_of_the_weights(calls):
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(tiny.model("mixtral"), peft.LoraConfig(r=2, target_modules=[], target_parameters=names))
    for name, p in model.named_parameters():
        p.data = torch.randn_like(p) if "lora_" in name else p.data
    want = model(IDS).logits
    with attnops.patch(model):
        assert relative(model(IDS).logits, want) < LIMIT and not calls


class Tagged(torch.Tensor):
    """As a quantised weight."""


def changed(module, how):
    weight = module.down_proj
    if how == "quantised":
        module.down_proj = nn.Parameter(weight.data.as_subclass(Tagged), requires_grad=False)
    elif how == "float64":
        module.to(torch.float64)
    elif how == "offloaded":
        module._hf_hook = SimpleNamespace(offload=True)
    elif how == "activation":
        module.act_fn = nn.Tanh()
    elif how == "shapes":
        module.down_proj = nn.Parameter(weight[:, :, 1:].clone())
    elif how == "parametrised":
        nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())
    else:
        module.config._experts_implementation = how


@pytest.mark.parametrize(("change", "why"), [
    ("quantised", "no plain parameters"), ("parametrised", "no plain parameters"), ("float64", "float64"), ("offloaded", "offloaded"),
    ("activation", "no activation of the op"), ("shapes", "have the shapes"), ("sonicmoe", "'sonicmoe'"),
])  # fmt: skip
def test_layers_that_are_left_say_why(change, why):
    model = tiny.model("mixtral")
    changed(model.model.layers[0].mlp.experts, change)
    before = [vars(m).keys() for m in model.modules()]
    with attnops.patch(model) as handle:
        left = [note for note in notes(handle) if "left as they are" in note]
        assert len(left) == 1 and why in left[0], notes(handle)
    assert [vars(m).keys() for m in model.modules()] == before


def test_an_implementation_that_is_set_later_stays():
    model = tiny.model("mixtral")
    with attnops.patch(model) as handle:
        model.set_experts_implementation("batched_mm")
        assert "set to 'batched_mm' after patch()" in notes(handle)[0]
    assert model.config._experts_implementation == "batched_mm"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@torch.no_grad()
def test_copies(again, calls):
    model = tiny.model("gpt_oss")
    want = model(IDS).logits
    attnops.patch(model)
    other = again(model)
    assert relative(other(IDS).logits, want) < LIMIT and len(calls) == 2
    vars(other)["_attnops"].unpatch()
    assert other.config._experts_implementation != model.config._experts_implementation
