"""ViTs of torchvision and timm, patched, in one process of their own: torchvision's library may not
load beside a CPU's torch."""

import sys
from pathlib import Path

import pytest

from tests.adapters.helpers import block
from tests.helpers import ready_process

VISION = Path(sys.prefix) / "vision"

START = f"""
import sys
sys.path.append({str(VISION)!r})
import torch
try:
    import torchvision
except (OSError, RuntimeError):
    # Its library does not load beside a CPU's torch: a stand-in.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        library.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
import timm
import attnops
from tests.adapters.helpers import Calls, Graphs, grads, same_grads
"""

VIT = """
from torchvision.models.vision_transformer import VisionTransformer
def vit():
    torch.manual_seed(0)
    return VisionTransformer(image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32)
images, ours, theirs = torch.randn(2, 3, 16, 16), vit(), vit()
keys = list(ours.state_dict())
torch.nn.init.normal_(ours.heads.head.weight)
theirs.load_state_dict(ours.state_dict())
with attnops.patch(ours) as handle:
    assert len(handle.report().patched) == 2 and list(ours.state_dict()) == keys
    assert handle.verify(images).passed
    with Calls() as calls:
        got = ours(images)
    assert calls.names == ["attnops::attention"] * 2
    same_grads(grads(ours, got.square().sum()), grads(theirs, theirs(images).square().sum()))
    graphs = Graphs()
    torch.compile(ours, fullgraph=True, backend=graphs)(images)
    assert graphs.count("attnops.attention") == [2]
"""  # noqa: E501

TIMM = """
NAMES = {  # attention modules; those without an adapter
    "vit_tiny_patch16_224": (1, 0), "vit_base_patch16_siglip_224": (2, 0), "eva02_tiny_patch14_224": (1, 0),
    "vit_small_patch16_dinov3": (1, 0), "beit_base_patch16_224": (1, 0), "cait_xxs24_224": (2, 1),
}
for name, (patched, skipped) in NAMES.items():
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=28 if "14" in name else 32, depth=1)
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        with attnops.patch(model) as handle:
            report = handle.report()
            assert (len(report.patched), len(report.skipped)) == (patched, skipped), report
            assert handle.verify(images).passed, name
            with Calls() as calls, torch.no_grad():
                model(images)
            assert calls.names == ["attnops::attention"] * patched, (name, calls.names)
        assert {m.fused_attn for m in model.modules() if hasattr(m, "fused_attn")} == {fused}
model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 1), window_size=7)
images = torch.randn(1, 3, 56, 56)
with attnops.patch(model.train()) as handle:
    assert handle.verify(images).passed
    ours = grads(model, model(images).square().sum())  # through the bias of relative positions, a mask
same_grads(ours, grads(model, model(images).square().sum()))
"""  # noqa: E501


@pytest.mark.slow
def test_vision_transformers():
    if not VISION.exists():
        pytest.skip(f"torchvision and timm are not in {VISION}, where `make` puts them")
    ready_process("\n".join([START, VIT, TIMM, block("torchvision"), block("timm")]))
