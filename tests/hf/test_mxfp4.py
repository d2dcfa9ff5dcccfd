"""Experts in four bits a number: models answer as before, what they save, what is refused, and
steps in graphs."""

import copy
import pickle

import pytest
import torch

import attnops
from attnops.bench import models
from attnops.bench.ways import How
from attnops.core.errors import PatchError
from attnops.core.problem import Target, pretend
from attnops.hf import pack_experts, tiny, unpack_experts
from attnops.hf.models import mxfp4
from attnops.hf.models.experts import SWITCH
from attnops.ops.experts.mxfp4 import MXFP4_EXPERTS
from attnops.ops.experts.mxfp4_reference import (
    MOST_SCALE,
    VALUES,
    arranged,
    decoded,
    encoded,
    restored,
    rounded,
)
from tests.hf.decoding import generated, how
from tests.hf.helpers import LIMIT, near, relative
from tests.hf.test_linears import judging
from tests.lowering.models import kernel_calls
from tests.test_bench import TOY

SM90 = Target("cuda", 90, assume=("triton",))
IDS = torch.arange(6).view(2, 3)


def gpt_oss(inner=64):
    """A model whose experts have weights of MXFP4."""
    model = tiny.model("gpt_oss", intermediate_size=inner)
    for layer in model.model.layers:
        for name in mxfp4.NAMES:
            p = getattr(layer.mlp.experts, name)
            count, columns, rows = p.shape
            blocks = torch.randint(0, 256, (count, rows, columns // 2)).to(torch.uint8)
            scales = torch.randint(120, 123, (count, rows, columns // 32)).to(torch.uint8)
            p.data = decoded(blocks, scales, torch.float32).transpose(1, 2).contiguous()
    return model


def bits(model):
    return {n: t.clone() for n, t in model.state_dict().items()}


@pytest.mark.parametrize("stock", ["eager", "grouped_mm"])
@torch.no_grad()
def test_models_answer_and_save_as_before(stock):
    model = gpt_oss()
    model.set_experts_implementation("eager")
    want, saved, names = model(IDS).logits, bits(model), [n for n, _ in model.named_parameters()]
    model.set_experts_implementation(stock)
    assert pack_experts(model) == len(model.model.layers)
    assert not any(
        n in mxfp4.NAMES for n, _ in model.model.layers[0].mlp.experts.named_parameters()
    )
    near(model(IDS).logits, want)
    with attnops.patch(model):
        near(model(IDS).logits, want)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        near(one(IDS).logits, want)
        now = one.state_dict()
        assert now.keys() == saved.keys() and all(torch.equal(now[n], saved[n]) for n in saved)
    unpack_experts(model)
    unpack_experts(model)
    assert [n for n, _ in model.named_parameters()] == names and all(
        p.requires_grad for p in model.parameters()
    )
    assert getattr(model.config, SWITCH) == stock
    now = model.state_dict()
    assert list(now) == list(saved) and all(torch.equal(now[n], saved[n]) for n in saved)


def shared(model):
    """A weight of two layers."""
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    return model


def rounded_elsewhere(model):
    model.model.layers[-1].mlp.experts.down_proj.data[1, 5, 7] = 0.3
    return model


def patched(model):
    attnops.patch(model)
    return model


DTYPES = r"want bfloat16 \| float32 \| float64 with data"
REFUSED = {
    "down_proj of GptOssExperts got numbers that are none of MXFP4": lambda: rounded_elsewhere(
        gpt_oss()
    ),
    "down_proj got 64 rows and 96 columns, want multiples of 16 and 64": lambda: gpt_oss(96),
    rf"gate_up_proj got float16 on cpu, {DTYPES}": lambda: gpt_oss().half(),
    rf"gate_up_proj got float32 on meta, {DTYPES}": lambda: gpt_oss().to("meta"),
    "GptOssExperts got a weight of another module, too, want weights of its own": lambda: shared(
        gpt_oss()
    ),
    r"GptOssForCausalLM got patched before, want pack_experts\(\) before": lambda: patched(
        gpt_oss()
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_are_refused_stay_as_they_are(why):
    model = REFUSED[why]()
    saved = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(PatchError, match=why):
        pack_experts(model)
    for n, p in model.named_parameters():
        assert p.is_meta or torch.equal(p, saved[n])
    assert (
        model.model.layers[0].mlp.experts.down_proj is model.model.layers[1].mlp.experts.down_proj
    ) == ("another module" in why)
    assert not any(mxfp4._PACKED in vars(m) for m in model.modules())


@torch.no_grad()
def test_loading_is_refused():
    model = gpt_oss()
    state = bits(model)
    pack_experts(model)
    with pytest.raises(
        PatchError,
        match=r"load_state_dict: model\.layers\.0\.mlp\.experts is packed; call unpack_experts",
    ):
        model.load_state_dict(state)
    assert pack_experts(tiny.model("mixtral")) == 0, "experts of halves are left"


@torch.no_grad()
def test_a_cast_after_packing():
    model = gpt_oss()
    pack_experts(model)
    model.bfloat16()
    want = model(IDS).logits
    assert {t.dtype for n, t in model.state_dict().items() if "experts" in n} == {torch.bfloat16}
    names = {n for n, _ in model.named_buffers()}
    unpack_experts(model)
    assert {p.dtype for layer in model.model.layers for p in layer.mlp.experts.parameters()} == {
        torch.bfloat16
    }
    assert {n for n in names if "experts" in n} and not any(
        "experts" in n for n, _ in model.named_buffers()
    )
    assert relative(model(IDS).logits, want) < 0.05


@torch.no_grad()
def test_generated_code_calls_the_kernel():
    model, (backend, code) = gpt_oss(), judging(MXFP4_EXPERTS)
    block, x = model.model.layers[1].mlp, torch.randn(1, 5, 64)
    want = block(x)
    pack_experts(model)
    with (
        attnops.patch(model),
        attnops.use(kernel={"route": "aten"}),
        torch._inductor.config.patch(fx_graph_cache=False),
        pretend(SM90),
    ):
        got = torch.compile(block, backend=backend, fullgraph=True)(x)
    [text] = code
    assert kernel_calls(text).count("mxfp4_experts.triton") == 1
    assert all(relative(a, b) < LIMIT for a, b in zip(got, want, strict=True))


@pytest.mark.full
def test_steps_in_graphs():
    model = gpt_oss()
    want = generated(model, 2, 4, 2)
    pack_experts(model)
    kernels = {"mxfp4_experts": "reference"}
    with (
        attnops.use(kernel=kernels),
        attnops.patch(model, cache="paged", decode=how("piecewise")) as handle,
    ):
        assert torch.equal(generated(model, 2, 4, 2), want)
        assert handle.graphs.report().whole == ""


def test_numbers_are_those_of_transformers():
    stock = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    scales = torch.arange(100, 116, dtype=torch.uint8).view(1, 4, 4)
    want = stock.convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(decoded(blocks.flatten(2), scales, torch.bfloat16), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_numbers_are_the_nearest_that_are_packed(dtype):
    weight = torch.randn(5, 96) * torch.logspace(-3, 3, 5)[:, None]
    weight[3, 32:64] = 0
    weight = weight.to(dtype)
    found = rounded(weight)
    assert encoded(found) is not None and torch.equal(rounded(found), found)
    groups, near = weight.float().view(-1, 32), found.float().view(-1, 32)
    for group, got in zip(groups, near, strict=True):
        scale = 2.0 ** (torch.frexp(group.abs().max())[1] - 3)
        values = torch.tensor([*VALUES, *(-v for v in VALUES)]) * scale
        assert torch.equal((got - group).abs(), (values[:, None] - group).abs().amin(0))


@pytest.mark.parametrize("name", mxfp4.NAMES)
@torch.no_grad()
def test_the_largest_scale_that_kernels_read(name):
    """Byte 128 is twice the numbers; their bfloat16 has no exponent for that of more."""
    for scale, fits in ((MOST_SCALE - 127, True), (MOST_SCALE - 126, False)):
        model = gpt_oss()
        weight = getattr(model.model.layers[0].mlp.experts, name)
        weight.data[0, :32, 0] = 0.0
        weight.data[0, 3, 0] = -6.0 * 2.0**scale
        saved = bits(model)
        if fits:
            pack_experts(model)
        else:
            with pytest.raises(
                PatchError, match=f"{name} of GptOssExperts got numbers that are none of MXFP4"
            ):
                pack_experts(model)
        assert all(torch.equal(t, saved[n]) for n, t in model.state_dict().items())


def signs(t):
    return torch.signbit(t).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_zeros_keep_their_signs(dtype):
    weight = (
        torch.tensor([0.0, -0.0, 1.0, -1.0, -0.0, 0.5, -6.0, 0.0] * 8)
        .view(1, 2, 32)
        .to(dtype)
        .repeat(1, 8, 2)
    )
    weight[0, 5] = -0.0
    assert signs(rounded(weight)) == signs(weight)
    blocks, scales = encoded(weight)
    assert signs(decoded(blocks, scales, dtype)) == signs(weight)
    for interleaved in (False, True):
        again = restored(*arranged(blocks, scales, interleaved), interleaved)
        assert torch.equal(again[0], blocks) and torch.equal(again[1], scales)
    model = gpt_oss().to(dtype)
    for name in mxfp4.NAMES:
        getattr(model.model.layers[0].mlp.experts, name).data[0, :4] = -0.0
    saved = {n: signs(t) for n, t in model.state_dict().items()}
    for change in (pack_experts, unpack_experts):
        change(model)
        assert {n: signs(t) for n, t in model.state_dict().items()} == saved


def test_the_bench_measures_packed_experts(monkeypatch):
    config = tiny.config("gpt_oss")
    config.intermediate_size = 64
    monkeypatch.setattr(models, "fitted", lambda *_: config)
    model = models.build(TOY, "gpt_oss")
    one, handle = models.patched(model, How({"cache": "paged"}, packed=True))
    with torch.no_grad():
        assert torch.equal(
            one.model.layers[0].mlp.experts.state_dict()["down_proj"],
            model.model.layers[0].mlp.experts.down_proj,
        )
        near(one(IDS).logits, model(IDS).logits)
    assert not any(n in mxfp4.NAMES for n, _ in one.model.layers[0].mlp.experts.named_parameters())
    handle.unpatch()
