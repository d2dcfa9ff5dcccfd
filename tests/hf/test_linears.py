"""Linears of Hugging Face models: which become one, or one call with their norm, activation and
residual; models answer as before."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from transformers import AutoModelForCausalLM

import attnops
from attnops.core.problem import Target, pretend
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.lowering import fuse_norm_linear_pass, merge_linears_pass
from attnops.nn import pack_linears
from attnops.ops.linear.record import LINEAR
from tests.hf.decoding import generated, graphed
from tests.hf.helpers import near, static
from tests.triton.process import interpreted

SM90 = Target("cuda", 90, assume=("triton",))
IDS = torch.arange(6).view(2, 3)

_BLOCK = "q: norm + linear, o: linear + residual"
_LLAMA = f"{_BLOCK}, gate: norm + linear + silu, down: linear + residual"
FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), _LLAMA),
    "phi3": _LLAMA.replace("q:", "qkv:").replace("gate:", "gate_up:"),
    "gemma": _LLAMA.replace("silu", "gelu_tanh"),
    # Norms after the products.
    "gemma3": "q: norm + linear, o: linear, gate: norm + linear + gelu_tanh, down: linear",
    "gemma2": "q: norm + linear, o: linear, gate: norm + linear + gelu_tanh, down: linear",
    "glm4": "q: norm + linear, o: linear, gate_up: norm + linear + silu, down: linear",
    # A factor between the product and the sum.
    "granite": "q: norm + linear, o: linear, gate: norm + linear + silu, down: linear",
    "olmo2": "q: linear, o: linear, gate: linear + silu, down: linear",
    # LayerNorm, and one sum of attention, MLP and residual.
    "cohere2": "q: linear, o: linear + residual, gate: linear + silu, down: linear + residual",
    # LayerNorm, and an activation without a gate.
    "starcoder2": "q: linear, o: linear + residual, c_fc: linear, c: linear + residual",
    "gpt_oss": f"{_BLOCK}, router: linear",
    "deepseek_v3": "q_a: norm + linear, q_b: norm + linear, kv_b: linear, o: linear + residual, "
    "gate: norm + linear + silu, down: linear + residual",
}


def short(product):
    name = (
        product.weight.removesuffix("_parameters_weight_")
        .rpartition("_modules_")[2]
        .removesuffix("_proj")
    )
    return f"{name}: {' + '.join(product.parts)}"


def code_of(gm, inputs):
    """The code that Inductor writes for a graph, compiled no further."""
    code = []

    def written(graph):
        code.append(graph.codegen()[0].value)
        raise NotImplementedError("the code is known")

    with (
        patch.object(GraphLowering, "compile_to_module", written),
        pytest.raises(Exception, match="the code is known"),
    ):
        compile_fx(gm, inputs)
    return "".join(code)


def by_reference(gm, op):
    """The graph with the reference of the op."""
    judged = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in judged.graph.find_nodes(op="call_function", target=op.packet.default):
        node.kwargs = {**node.kwargs, "policy": f"kernel={op.name}:reference"}
    judged.recompile()
    return judged


def judging(op):
    """(a backend that runs a graph with the reference of the op, the code that Inductor writes for
    each, with the kernels chosen)."""
    code = []

    def backend(gm, inputs):
        judged = by_reference(gm, op)
        code.append(code_of(gm, inputs))
        return judged

    return backend, code


class Fusing:
    """A backend that chooses kernels as on a GPU, and runs the graph with the references of the
    kernels.

    code: what Inductor writes for the graph, if asked for. calls, left: of the op, and linears that
    are none.
    """

    def __init__(self, coded=False):
        self.products, self.coded, self.code, self.calls, self.left = [], coded, "", 0, 0

    def __call__(self, gm, inputs):
        with pretend(SM90):
            merge_linears_pass(gm)
            self.products += fuse_norm_linear_pass(gm)
            judged = by_reference(gm, LINEAR)
            self.code += code_of(gm, inputs) if self.coded else ""
        self.left += len(
            judged.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)
        )
        self.calls += len(judged.graph.find_nodes(op="call_function", target=LINEAR.packet.default))
        return judged


@pytest.mark.sweep(9)
@pytest.mark.parametrize("family", FAMILIES)
def test_linears_of_a_layer(family):
    layers = {"layer_types": ["sliding_attention"]} if family in ("gemma2", "gemma3") else {}
    # The code of one family is as that of the others.
    model = tiny.model(family, num_hidden_layers=1, **layers)
    backend = Fusing(coded=family == "llama")
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        want = model(IDS).logits
        attnops.patch(model)
        pack_linears(model)
        model.model.layers[0].compile(backend=backend, fullgraph=True)
        got = model(IDS).logits
    assert ", ".join(map(short, backend.products)) == FAMILIES[family]
    assert {product.kernel for product in backend.products} == {"triton"}
    assert (backend.calls, backend.left) == (len(backend.products), 0)
    assert (
        backend.code.count("torch.ops.attnops.linear.triton.run(") == backend.calls * backend.coded
        and "mm(" not in backend.code
    )
    near(got, want)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_logits_are_no_less_exact_than_eagers(family):
    """bfloat16 against float32 of the same weights: of eager, and of the layer in calls that round
    once."""
    ids = torch.arange(64).view(4, 16)
    one = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    model = tiny.model(
        family, **(one if family != "llama" else {"num_hidden_layers": 1})
    ).bfloat16()
    with torch.no_grad():
        exact, own = copy.deepcopy(model).float()(ids).logits, model(ids).logits
        with attnops.patch(model), attnops.use(kernel={"attention": "reference"}):
            pack_linears(model)
            model.model.layers[0].compile(backend=Fusing())
            ours = model(ids).logits
    assert (ours - exact).norm() <= (own - exact).norm()


CALL = (2, 4, 2)


def test_decode_steps():
    model = tiny.model("llama")
    want = generated(model, *CALL)
    with attnops.use(kernel={"linear": "reference"}), graphed(model, "piecewise") as handle:
        assert torch.equal(generated(model, *CALL), want)
        [note] = [note for note in handle.report().notes if note.startswith("linears")]
        assert note.startswith(
            "linears of compiled layers, 5 of 5 recognised: 1 norm + linear by reference, "
        )
        assert handle.graphs.report().whole == ""


def test_decode_steps_on_a_cpu_keep_torchs_operations():
    model = tiny.model("llama")
    with graphed(model, "piecewise") as handle:
        generated(model, *CALL)
        assert {product.kernel for product in handle._paged.decoder().products} == {"aten"}
    with graphed(model, "piecewise", pack=False) as handle:
        generated(model, *CALL)
        assert not any(note.startswith("linears") for note in handle.report().notes)


@pytest.mark.full
@interpreted
def test_decode_steps_by_triton():
    model = tiny.model("llama", num_hidden_layers=2)
    want = generated(model, *CALL)
    with pretend(SM90), graphed(model, "piecewise") as handle:
        assert torch.equal(generated(model, *CALL), want)
        assert handle.graphs.report().whole == ""
        assert {product.kernel for product in handle._paged.decoder().products} == {"triton"}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("family", "alone"), [("gemma3", 1), ("olmo2", 3)])
@interpreted
def test_norms_of_recorded_layers_by_triton(family, alone):
    """Those after attention and MLP with the residual; alone the last one, and OLMo 2's of all
    queries and of all keys."""
    model = tiny.model(family)
    want = generated(model, *CALL)
    with pretend(SM90), graphed(model, "auto", compile_after=99) as handle:
        assert torch.equal(generated(model, *CALL), want)
        assert handle.graphs.report().not_recorded == ""
        [note] = [note for note in handle.report().notes if note.startswith("norms")]
    assert f"{alone} norm by triton" in note and "2 norm + residual by triton" in note, note


# Linears that become one --------------------------------------------------------------------------


def weights_of(fused):
    """One line a group: modules and rows."""
    # Dynamo names the model `self`, or `args[0]` where a decorator is around its forward, as
    # transformers 5.24 has one.
    paths = [
        w.replace("_modules_", ".").removesuffix("_parameters_weight_").partition(".layers.")[2]
        for w in fused.weights
    ]
    assert all(paths) and not fused.refusal
    return " + ".join(f"{n}[{rows}]" for n, rows in zip(paths, fused.rows, strict=True))


def attention_of(layer, rows, others):
    names = ["q_proj", "k_proj", "v_proj"]
    return " + ".join(
        f"{layer}.self_attn.{name}[{n}]"
        for name, n in zip(names, (rows, others, others), strict=True)
    )


MLP = "{0}.mlp.gate_proj[96] + {0}.mlp.up_proj[96]"
GROUPS = {
    "llama": [attention_of(0, 64, 32), MLP.format(0), attention_of(1, 64, 32), MLP.format(1)],
    "gpt-oss-small": [attention_of(0, 256, 128)],
    "deepseek_v3": ["0.self_attn.q_a_proj[24] + 0.self_attn.kv_a_proj_with_mqa[40]", MLP.format(0)],
}


@pytest.mark.parametrize("family", GROUPS)
@torch.no_grad()
def test_linears_that_become_one(family, tmp_path):
    """The weights are saved as before, and loaded."""
    model, told = tiny.model(family, num_hidden_layers=2 if family == "llama" else 1), []
    before = {n: t.clone() for n, t in model.state_dict().items()}
    attnops.patch(model)

    def backend(gm, inputs):
        told.extend(merge_linears_pass(gm))
        return gm.forward

    want = model(IDS).logits
    assert pack_linears(model).groups
    torch.testing.assert_close(model(IDS).logits, want, rtol=0, atol=0)
    torch.testing.assert_close(
        torch.compile(model, backend=backend)(IDS).logits, want, rtol=1e-4, atol=1e-4
    )
    assert list(map(weights_of, told)) == GROUPS[family]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(before) and all(torch.equal(loaded[n], before[n]) for n in before)


def test_tied_embeddings_stay_tied():
    model = tiny.model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    pack_linears(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


FLASH = "_scaled_dot_product_flash_attention_for_cpu.default("


@pytest.mark.full
@torch.no_grad()
def test_a_decode_step_copies_no_slice():
    """One kernel rotates queries and keys and stores them and the values, which are read where the
    product left them."""
    model = tiny.model("llama", num_hidden_layers=1)
    attnops.patch(model)
    pack_linears(model)
    cache = static(model, 32)
    with torch._inductor.config.patch(fx_graph_cache=False):
        model(IDS, **named(cache))
        compiled = torch.compile(model, options={"pre_grad_custom_pass": merge_linears_pass})
        _, code = run_and_get_code(compiled, IDS[:, :1], **named(cache))
    body = "\n".join(code).partition("def call(")[2]
    calls = [
        line.strip().partition("(")[0].rpartition(".")[2]
        for line in body.splitlines()
        if FLASH in line or "mm(" in line or line.strip().startswith("cpp_fused")
    ]
    kinds = ["kernel" if c.startswith("cpp_fused") else c for c in calls]
    assert kinds == [
        "kernel",
        "mm",
        "kernel",
        "default",
        "mm",
        "kernel",
        "mm",
        "kernel",
        "mm",
        "kernel",
        "mm",
        "kernel",
    ]
