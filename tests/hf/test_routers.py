"""The routers of Hugging Face models: whose are taken over, that they route as before, and which calls stay transformers' own."""

import copy
import pickle
from unittest.mock import patch

import pytest
import torch
from torch import nn

import attnops
from attnops.core.problem import Target, pretend
from attnops.hf import routers, tiny
from attnops.nn.steady import class_of
from attnops.ops.experts.route import ROUTE
from tests.hf.helpers import LIMIT, calls_of, relative
from tests.hf.test_decode_graphs import generated, how
from tests.hf.test_linears import judging
from tests.lowering.models import kernel_calls
from tests.triton.process import interpreted

SM90 = Target("cuda", 90, assume=("triton",))
IDS = torch.arange(6).view(2, 3)
REFERENCE = {"route": "reference"}

# By family: changes of the tiny config, and what the rule asks beside the number of choices.
NORMAL = {"normalize": True}
V3 = {"scoring": "sigmoid", "normalize": True, "eps": 1e-20}
FAMILIES = {
    "qwen2_moe": ({}, {}), "qwen3_moe": ({"norm_topk_prob": True}, NORMAL), "mixtral": ({}, NORMAL), "gpt_oss": ({}, NORMAL),
    "deepseek_v2": ({"topk_method": "greedy", "routed_scaling_factor": 16.0}, {"scale": 16.0}),
    "deepseek_v2_groups": (
        # Of two groups by their best expert, the two best experts of all are the result.
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1, "routed_scaling_factor": 2.0},
        {"groups": 4, "scale": 2.0},
    ),
    "deepseek_v3": ({"n_group": 4, "topk_group": 2}, {**V3, "groups": 4, "top_groups": 2, "group_best": 2, "scale": 2.5}),
    "glm4_moe": ({}, V3), "kimi_linear": ({}, {**V3, "scale": 2.446}), "mimo_v2_flash": ({}, V3),
    "minimax_m2": ({}, {"scoring": "sigmoid", "normalize": True}),
}  # fmt: skip
FEWER = {"deepseek_v2": 1, "deepseek_v2_groups": 1, "deepseek_v3": 1, "glm4_moe": 1, "kimi_linear": 3, "mimo_v2_flash": 1}


def model_of(family):
    return tiny.model(family.removesuffix("_groups"), **FAMILIES[family][0])


def routers_of(model):
    return [m for m in model.modules() if routers._RULE in vars(m)]


def notes(handle):
    return [note for note in handle.report().notes if note.startswith("routers")]


@pytest.fixture
def calls(monkeypatch):
    with calls_of(monkeypatch, routers, "route") as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "weight in float32"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_router_gives_what_its_own_code_gives(family, dtype, calls):
    """Logits to the bit, the same experts, their weights within rounding."""
    model = model_of(family)
    with attnops.patch(model), attnops.use(kernel=REFERENCE):
        module = routers_of(model)[0]
        rule = vars(module)[routers._RULE]
        assert rule.given == FAMILIES[family][1]
        if dtype is None and not rule.mixed:
            pytest.skip("the router multiplies in the dtype of the tokens, and its own code raises")
        kept, dtype = dtype or torch.float32, dtype or torch.bfloat16
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            t.copy_(torch.randn_like(t))
        module.weight.data = module.weight.data.to(kept)
        for p in module._parameters.values():
            p.data = p.data.to(kept)
        x = torch.randn(200, module.weight.shape[1]).to(dtype)
        bias = [torch.randn(module.weight.shape[0])] if rule.bias == routers.HANDED else []
        for tokens in (x, x.view(20, 10, -1)) if rule.flattens else (x,):
            calls.clear()
            own, ours = type(module).__mro__[1].forward(module, tokens, *bias), module(tokens, *bias)
            assert len(calls) == 1
            assert [(t.shape, t.dtype) for t in own] == [(t.shape, t.dtype) for t in ours]
            assert torch.equal(own[0], ours[0])
            (a, b), exact = (t[2].sort(1) for t in (own, ours)), dtype == torch.float32
            same = (a.values == b.values).all(1)
            assert same.all() if exact else same.float().mean() > 0.8, "in bfloat16 logits tie, and torch.topk may take either"
            weights = own[1].gather(1, a.indices)[same], ours[1].gather(1, b.indices)[same]
            torch.testing.assert_close(*weights, **({} if exact else {"rtol": 2.0**-6, "atol": 1e-3}))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_models_answer_as_before(family, calls):
    model, n = model_of(family), FEWER.get(family, 2)
    classes = [type(m) for m in model.modules()]
    want = model(IDS).logits
    with attnops.patch(model) as handle:
        assert relative(model(IDS).logits, want) < LIMIT
        assert calls == [IDS.numel()] * n
        assert [note.startswith(f"routers of {n} of {n} layers: ") for note in notes(handle)] == [True]
    assert [type(m) for m in model.modules()] == classes and not routers_of(model)
    assert torch.equal(model(IDS).logits, want) and len(calls) == n


@torch.no_grad()
def test_router_logits_are_recorded(calls):
    model = tiny.model("qwen3_moe")
    want = model(IDS, output_router_logits=True)
    with attnops.patch(model):
        got = model(IDS, output_router_logits=True)
    assert len(got.router_logits) == 2 and calls
    for a, b in zip(got.router_logits, want.router_logits, strict=True):
        assert relative(a, b) < LIMIT
    assert relative(got.aux_loss, want.aux_loss) < LIMIT


@pytest.mark.sweep(6)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
@torch.no_grad()
def test_generated_code_calls_the_kernel(family):
    model, (backend, code) = model_of(family), judging(ROUTE)
    block, x = model.model.layers[1].mlp, torch.randn(1, 5, 64)
    want = block(x)
    others = {"experts": "aten"}
    with attnops.patch(model), attnops.use(kernel=others), torch._inductor.config.patch(fx_graph_cache=False), pretend(SM90):
        got = torch.compile(block, backend=backend, fullgraph=True)(x)
    [text] = code
    assert kernel_calls(text).count("route.triton") == 1 and "topk" not in text
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    assert all(relative(a, b) < LIMIT for a, b in pairs)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("mode", ["piecewise", "breakable"])
@interpreted
def test_decode_steps_by_triton(family, mode):
    from attnops.kernels.triton.launch import route as host

    model, launched = tiny.model(family), []
    want, launch = generated(model, 2, 4, 2), host.launch
    names = ("paged_attention", "attention", "write_kv", "mla_attention", "write_latent")
    others = {"linear": "aten", "experts": "aten", **dict.fromkeys(names, "reference")}
    counted = patch.object(host, "launch", lambda *args, **given: (launched.append(args[1]), launch(*args, **given)))
    with counted, attnops.use(kernel=others), pretend(SM90), attnops.patch(model, cache="paged", decode=how(mode)) as handle:
        assert torch.equal(generated(model, 2, 4, 2), want)
        assert handle.graphs.report().whole == ""
    assert launched.count((2,)) >= 3, "two rows, for three steps"


def test_explain_of_a_config_without_weights():
    from attnops.cli.explain import explain_config

    found = explain_config(tiny.config("deepseek_v3"), dtype=torch.bfloat16, target="h200", tokens=100)
    chosen = {phase: [s.decision.kernel.name for s in one.sites if s.decision.problem.op == "route"] for phase, one in found.items()}
    assert chosen == {"prefill": ["triton"], "decode": ["triton"]}


# Calls that stay transformers' own ------------------------------------------------------------------------------------


def served(model, x):
    module = routers_of(model)[0]
    return routers._serves(module, (x,), vars(module)[routers._RULE])


def test_calls_that_are_left():
    model, x = tiny.model("mixtral"), torch.randn(3, 64)
    with attnops.patch(model), torch.no_grad():
        assert not served(model, x), "on a CPU"
        with pretend(SM90):
            assert served(model, x) and served(model, torch.randn(4096, 64)) and served(model, x[None])
            assert not served(model, x.bfloat16()) and not served(model, x[:, :9])
            with attnops.use(kernel={"route": "aten"}):
                assert not served(model, x)
            with torch.autocast("cpu"):
                assert not served(model, x)
            with torch.enable_grad():
                assert not served(model, x)
            model.train()
            assert not served(model, x), "routers may add noise"


@torch.no_grad()
def test_a_router_whose_numbers_are_set_anew_runs_its_own_code(calls):
    model = tiny.model("qwen3_moe")
    with attnops.patch(model):
        before = model(IDS).logits
        taken = len(calls)
        for layer in model.model.layers:
            layer.mlp.gate.top_k, layer.mlp.gate.norm_topk_prob = 1, True
        got = model(IDS).logits
        assert len(calls) == taken > 0
    assert relative(got, want := model(IDS).logits) < LIMIT < relative(before, want)


def test_a_part_of_a_model_and_the_model_may_be_patched():
    model = tiny.model("mixtral")
    gates = [layer.mlp.gate for layer in model.model.layers]
    own = type(gates[0])
    for last in (0, 1):
        handles = [attnops.patch(model.model), attnops.patch(model)]
        assert "another patch has taken them over" in str(handles[1].report())
        handles[1 - last].unpatch()
        handles[last].unpatch()
        assert {type(gate) for gate in gates} == {own}


def test_a_router_that_writes_keeps_its_own_code():
    model = tiny.model("mixtral")
    gate = model.model.layers[0].mlp.gate

    class CountingRouter(type(gate)):
        def forward(self, hidden_states):
            self.seen.add_(1)
            return super().forward(hidden_states)

    gate.__class__ = CountingRouter
    gate.register_buffer("seen", torch.zeros(()))
    [*found] = routers.sites(model)
    assert isinstance(found[0].found, str) and isinstance(found[1].found, routers.Rule)


def test_gradients(calls):
    model = tiny.model("mixtral")
    with attnops.patch(model):
        model(IDS).logits.sum().backward()
    assert not calls and model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_hooks_run_as_before(calls):
    model, seen = tiny.model("mixtral"), []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, out: seen.append(out[2].shape))
    with attnops.patch(model):
        model(IDS)
    assert seen == [(6, 2)] and len(calls) == 2


@torch.no_grad()
def test_an_adapter_of_the_weight(calls):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.gate.weight"])
    model = peft.get_peft_model(tiny.model("mixtral"), config).eval()
    for name, p in model.named_parameters():
        p.data = torch.randn_like(p) if "lora_" in name else p.data
    want = model(IDS).logits
    with attnops.patch(model):
        assert relative(model(IDS).logits, want) < LIMIT and not calls
    assert torch.equal(model(IDS).logits, want)


def test_rules_that_the_op_has_not():
    model = tiny.model("mixtral")
    gates = [layer.mlp.gate for layer in model.model.layers]
    own = type(gates[0])

    class Squared(own):
        def forward(self, hidden_states):
            logits, weights, index = super().forward(hidden_states)
            return logits, weights.square(), index

    class Second(own):
        """The second best to the third."""

        def forward(self, hidden_states):
            logits, weights, index = super().forward(hidden_states)
            return logits, weights, (index + 1) % 4

    for cls in (Squared, Second):
        gates[0].__class__ = cls
        with attnops.patch(model) as handle:
            assert f"the op does not choose as {cls.__name__} does" in notes(handle)[1]
            assert notes(handle)[0].startswith("routers of 1 of 2 layers: ") and class_of(gates[0]) is cls


class Tagged(torch.Tensor):
    """As a quantised weight."""


def changed(module, how):
    if how == "quantised":
        module.weight = nn.Parameter(module.weight.data.as_subclass(Tagged), requires_grad=False)
    elif how == "float64":
        module.to(torch.float64)
    elif how == "parametrised":
        nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    elif how == "instance":
        module.forward = module.forward
    else:
        module.compile(backend="eager")


@pytest.mark.parametrize(("change", "why"), [
    ("quantised", "no plain parameters"), ("parametrised", "no plain parameters"), ("float64", "float64"),
    ("instance", "forward is replaced"), ("compiled", "or compiled"),
])  # fmt: skip
def test_layers_that_are_left_say_why(change, why):
    model = tiny.model("mixtral")
    changed(model.model.layers[0].mlp.gate, change)
    before = [(type(m), vars(m).keys()) for m in model.modules()]
    with attnops.patch(model) as handle:
        assert len(notes(handle)) == 2 and why in notes(handle)[1], notes(handle)
    assert [(type(m), vars(m).keys()) for m in model.modules()] == before


@pytest.mark.parametrize("name", ["phimoe", "llama4", "longcat_flash"])
def test_families_that_are_left_say_why(name):
    with attnops.patch(tiny.model(name)) as handle:
        assert len(notes(handle)) == 1 and "are left as they are: " in notes(handle)[0]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@torch.no_grad()
def test_copies(again, calls):
    model = tiny.model("gpt_oss")
    want = model(IDS).logits
    attnops.patch(model)
    other = again(model)
    assert relative(other(IDS).logits, want) < LIMIT and len(calls) == 2
    vars(other)["_attnops"].unpatch()
    assert not routers_of(other) and routers_of(model)
    assert torch.equal(other(IDS).logits, want) and len(calls) == 2
