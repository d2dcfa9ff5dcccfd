"""diffusers: attnops as a backend of its dispatcher, and models whose processors call torch by
themselves."""

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers (extra dev) is not installed")

from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor

import attnops
import attnops.adapters.diffusers
from attnops.core.errors import InvalidInput, PatchError, UnknownKernel
from tests.adapters.helpers import Calls, Graphs, block, grads, same_grads
from tests.helpers import ready_process

MASKS = {
    "right": [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]],
    "gaps": [[1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 0, 1]],
}


def flux():
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def flux_inputs():
    torch.manual_seed(1)
    return {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.ones(2),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(6, 3),
        "return_dict": False,
    }


def unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(4, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=2,
    ).eval()


def qkv():
    torch.manual_seed(0)
    return [torch.randn(2, n, 4, 16) for n in (5, 7, 7)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("form", ["2-D bool", "4-D bool", "4-D float"])
def test_masks(kind, form):
    """`[B, K]` and what broadcasts to `[B, H, S, K]`."""
    mask = torch.tensor(MASKS[kind]).bool()
    if form != "2-D bool":
        mask = mask[:, None, None].expand(-1, 1, 5, -1)
    if form == "4-D float":
        mask = torch.where(mask, torch.randn(2, 4, 5, 7), float("-inf"))
    query, key, value = qkv()
    with Calls() as calls:
        got = dispatch_attention_fn(
            query, key, value, mask, backend=attnops.adapters.diffusers.backend(None)
        )
    assert calls.names == ["attnops::attention"]
    torch.testing.assert_close(got, dispatch_attention_fn(query, key, value, mask, scale=16**-0.5))


def test_dispatched_model():
    ours, theirs = flux(), flux()
    with attnops.patch(ours) as handle:
        assert len(handle.report().patched) == 2 and handle.verify(**flux_inputs()).passed
        with Calls() as calls:
            got = ours(**flux_inputs())[0]
        assert calls.names == ["attnops::attention"] * 2
        want = theirs(**flux_inputs())[0]
        same_grads(grads(ours, got.square().sum()), grads(theirs, want.square().sum()))
        graphs = Graphs()
        torch.testing.assert_close(
            torch.compile(ours, fullgraph=True, backend=graphs)(**flux_inputs())[0], want
        )
        assert graphs.count("attnops.attention") == [2]
    assert ours.transformer_blocks[0].attn.processor._attention_backend is None


def test_processors_that_call_torch():
    ours = unet()
    inputs = {"timestep": 1, "encoder_hidden_states": torch.randn(2, 5, 16), "return_dict": False}
    inputs["encoder_attention_mask"] = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]).bool()
    sample = torch.randn(2, 4, 8, 8)
    with attnops.patch(ours) as handle:
        found = len(handle.report().patched)
        assert found and not handle.report().skipped and handle.verify(sample, **inputs).passed
        graphs = Graphs()
        torch.compile(ours, fullgraph=True, backend=graphs)(sample, **inputs)
        assert graphs.count("attnops.attention") == [found]
    ours.set_attn_processor(AttnProcessor())
    with pytest.raises(
        PatchError,
        match="Attention: its AttnProcessor does not call torch's scaled_dot_product_attention",
    ):
        attnops.patch(ours)


@pytest.fixture
def native_afterwards():
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(
        attention_dispatch.AttentionBackendName.NATIVE
    )


def test_by_name(native_afterwards):
    """As diffusers' users choose a backend. The handle gives back the one from before."""
    ours = flux()

    def ops():
        with Calls() as calls:
            ours(**flux_inputs())
        return calls.names

    both = ["attnops::attention"] * 2
    ours.set_attention_backend("_native_math")
    own = ours.transformer_blocks[0].attn.processor._attention_backend
    with attnops.patch(ours, kernel="reference"):
        assert ops() == both
    assert ours.transformer_blocks[0].attn.processor._attention_backend is own
    ours.set_attention_backend("attnops")
    assert ops() == both
    with pytest.raises(PatchError, match="FluxAttention: it calls attnops already"):
        attnops.patch(ours)
    ours.reset_attention_backend()
    with attention_backend("attnops"):
        assert ops() == both
    with pytest.raises(UnknownKernel):
        attnops.patch(ours, kernel="no_such")


@pytest.mark.full
def test_saved_and_loaded_in_another_process(tmp_path):
    ours = flux()
    attnops.patch(ours, kernel="reference")
    torch.save(ours, tmp_path / "flux.pt")
    code = f"""
import torch
model = torch.load({str(tmp_path / "flux.pt")!r}, weights_only=False)
print(model.transformer_blocks[0].attn.processor._attention_backend.value, len(model._attnops.report().patched))
"""  # noqa: E501
    assert ready_process(code).strip() == "attnops_reference 2"


def test_what_is_refused():
    query, key, value = qkv()
    backend = attnops.adapters.diffusers.backend(None)
    with pytest.raises(InvalidInput, match="parallel_config"):
        dispatch_attention_fn(query, key, value, backend=backend, parallel_config=object())
    with pytest.raises(InvalidInput, match="attn_mask: got str, want a tensor"):
        dispatch_attention_fn(query, key, value, "a mask", backend=backend)
    ours = flux()
    for name in ("transformer_blocks", "single_transformer_blocks"):
        getattr(ours, name)[0].attn.processor._parallel_config = object()
    with pytest.raises(PatchError, match="FluxAttention: it runs in context parallelism"):
        attnops.patch(ours)


@pytest.mark.parametrize("what", ["UNet2DConditionModel", "FluxTransformer2DModel"])
def test_the_page(what, native_afterwards):
    exec(block(what), {})
