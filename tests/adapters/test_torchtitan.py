"""torchtitan 0.3: overridden by its trainer's door, and patched.

Logits and gradients are those of torchtitan's own models with flex_attention, whose masks are its
own and whose softmax is written out here: on a CPU flex_attention has no gradient, and torchtitan's
varlen attention needs a GPU.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

pytest.importorskip("torchtitan", reason="torchtitan (extra dev) is not installed")
pytest.importorskip(
    "torchtitan.config.override",
    reason="torchtitan 0.2 is installed: see test_torchtitan_02.py",
)

from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models import gpt_oss, llama3
from torchtitan.models.common import attention as theirs

import attnops
from attnops.adapters import torchtitan as ours
from attnops.core.errors import InvalidInput, PatchError, UnknownKernel
from tests.adapters.helpers import Calls, Graphs, block, grads, same_grads
from tests.helpers import fresh_process

DOOR = "attnops.adapters.torchtitan.varlen"
TOKENS = torch.randint(0, 2048, (2, 24), generator=torch.Generator().manual_seed(0))
# Two documents in the first row, one in the second.
POSITIONS = torch.arange(24).repeat(2, 1)
POSITIONS[0, 9:] -= 9


def written_out(query, key, value, *, block_mask, scale, return_aux, **_):
    """flex_attention, as a softmax over all pairs."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    batch, _, queries, dim = query.shape
    rows, i, j = torch.arange(batch), torch.arange(queries), torch.arange(key.shape[2])
    see = block_mask.mask_mod(rows[:, None, None], 0, i[:, None], j)[:, None]
    logits = query @ key.mT * (dim**-0.5 if scale is None else scale)
    logits = logits.masked_fill(~see, float("-inf"))
    return logits.softmax(-1) @ value, SimpleNamespace(lse=logits.logsumexp(-1))


@pytest.fixture(autouse=True)
def plain_flex(monkeypatch):
    monkeypatch.setattr(theirs.FlexAttention, "_compiled_flex_attn", staticmethod(written_out))
    monkeypatch.setattr(theirs, "_compiled_create_block_mask", create_block_mask)


def config(family, backend):
    found = family.model_registry("debugmodel", attn_backend=backend).model
    del found.layers[2:]
    return found


def overridden(given, imports=(DOOR,)):
    apply_overrides(OverrideConfig(imports=list(imports)), given)
    return given


def build(given):
    torch.manual_seed(0)
    model = given.build().float()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model


def run(model):
    masks = model.get_attention_masks(POSITIONS)
    return model(TOKENS, attention_masks=masks, positions=POSITIONS)


def loss(logits):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.mark.parametrize("way", ["overridden", "patched"])
def test_forward_and_backward(way):
    own, model = build(config(llama3, "flex")), build(config(llama3, "varlen"))
    if way == "overridden":
        model = build(overridden(config(llama3, "varlen")))
        assert sum(isinstance(m, ours.VarlenAttention) for m in model.modules()) == 2
    else:
        rows = attnops.patch(model).report().patched
        paths = [f"layers.{i}.attention.inner_attention" for i in range(2)]
        assert [row.path for row in rows] == paths
    model.load_state_dict(own.state_dict())
    with Calls() as calls:
        got = run(model)
    assert calls.names == ["attnops::varlen_attention"] * 2
    want = run(own)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    same_grads(grads(model, loss(got)), grads(own, loss(want)))


@pytest.mark.parametrize("layer", [0, 1])
def test_windows_and_sinks_of_gpt_oss(layer):
    """One layer has a window. The sinks are computed from the lse, whose gradient counts."""
    own, model = (build(config(gpt_oss, backend)) for backend in ("flex", "varlen"))
    attnops.patch(model)
    model.load_state_dict(own.state_dict())
    windows = {block.attention.inner_attention.window_size for block in model.layers.values()}
    assert len(windows) == 2
    x = torch.randn(2, 24, own.config.dim)
    found = []
    for each in (model, own):
        masks = each.get_attention_masks(POSITIONS)
        block = each.layers[str(layer)]
        masks = masks[block.attn_mask_key] if isinstance(masks, dict) else masks
        output = block.attention(x, masks, POSITIONS)
        found.append((output, grads(block.attention, output.square().sum())))
    (got, ours_grads), (want, own_grads) = found
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert own_grads["sinks"].abs().max() > 0
    same_grads(ours_grads, own_grads)


def test_compiled_whole():
    model, graphs = build(overridden(config(llama3, "varlen"))), Graphs()
    want = run(model)
    masks = model.get_attention_masks(POSITIONS)
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    got = compiled(TOKENS, attention_masks=masks, positions=POSITIONS)
    torch.testing.assert_close(got, want)
    assert graphs.count("attnops.varlen_attention") == [2]


def test_the_door_on_the_command_line():
    """As torchtitan's trainer goes through it, the kernel included."""
    asked = ["--module", "llama3", "--config", "llama3_debugmodel_varlen_attn"]
    asked += ["--override.imports", f'{DOOR}={{"kernel": "reference"}}']
    job = ConfigManager().parse_args(asked)
    told = apply_overrides(job.override, job)
    inner = [layer.attention.inner_attention for layer in job.model_spec.model.layers]
    assert len(told) == len(inner) > 2
    assert all(type(each) is ours.VarlenAttention.Config for each in inner)
    assert {each.kernel for each in inner} == {"reference"}
    assert inner[0].build().kernel == "reference"


def test_what_the_config_says_is_kept():
    given = theirs.VarlenAttention.Config(window_size=(7, 0), sharding_config=object())
    made = ours.varlen(given)
    assert (made.window_size, made.sharding_config) == ((7, 0), given.sharding_config)
    # By these names torchtitan looks up how inputs are distributed.
    names = [own._cache_pos_arg_names() for own in (given.build(), made.build())]
    assert names[0] == names[1]
    with pytest.raises(UnknownKernel):
        ours.varlen(given, kernel="nonsense")


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (4, 0), (3, 2), (0, 0)])
def test_windows(window):
    inner = ours.varlen(theirs.VarlenAttention.Config(window_size=window)).build()
    query = torch.randn(1, 10, 2, 16)
    masks = theirs.create_varlen_metadata_for_document(torch.arange(10)[None])
    offset = torch.arange(10) - torch.arange(10)[:, None]
    left, right = (10 if side < 0 else side for side in window)
    mask = (offset >= -left) & (offset <= right)
    heads = query.transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, mask)
    got = inner(query, query, query, attention_masks=masks)
    torch.testing.assert_close(got, want.transpose(1, 2))


def test_dtypes_under_autocast():
    """The query may be a norm's float32. The output has its dtype, as torchtitan's own."""
    inner = ours.varlen(theirs.VarlenAttention.Config()).build()
    query, value = torch.randn(1, 10, 2, 16), torch.randn(1, 10, 2, 16, dtype=torch.bfloat16)
    masks = theirs.create_varlen_metadata_for_document(torch.arange(10)[None])
    with torch.autocast("cpu", torch.bfloat16):
        got = inner(query, query, value, attention_masks=masks)
    want = inner(query.bfloat16(), query.bfloat16(), value, attention_masks=masks)
    assert got.dtype == torch.float32 and want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want.float())


def test_the_batch_invariant_mode_is_a_deterministic_policy(monkeypatch):
    policies = []
    real = ours.attend
    monkeypatch.setattr(ours, "attend", lambda call: policies.append(call.policy) or real(call))
    monkeypatch.setattr(ours, "is_in_batch_invariant_mode", lambda: True)
    model = build(overridden(config(llama3, "varlen"), [(DOOR, {"kernel": "reference"})]))
    run(model)
    with attnops.use(deny=("fa3",), deterministic=True):
        run(model)
    kinds = {tuple(sorted(key.split(";"))) for key in policies}
    forced = "kernel=varlen_attention:reference"
    assert kinds == {("deterministic", forced), ("deny=fa3", "deterministic", forced)}


TENSOR_PARALLEL = f"""
import spmd_types as spmd
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
config = model_registry("debugmodel", attn_backend="varlen").model
del config.layers[1:]
set_llama3_sharding_config(config, enable_sp=True)
apply_overrides(OverrideConfig(imports=["{DOOR}"]), config)
model = config.build()
with torch.no_grad():
    model.init_states(buffer_device=torch.device("cpu"))
dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2)
dims.build_mesh()
model.parallelize(dims)
tokens, positions = torch.randint(0, 2048, (2, 16)), torch.arange(16).repeat(2, 1)
masks = model.get_attention_masks(positions)
given = annotate_input_spmd_types(dims, tokens, tokens.clone(), dict(positions=positions))
with get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
    logits = model(given[0], attention_masks=masks, **given[2])
with spmd.no_typecheck():
    logits.sum().backward()
print(type(model.layers["0"].attention.inner_attention).__module__, list(logits.shape))
"""


def test_where_torchtitan_checks_how_tensors_are_distributed():
    """Two ranks share the heads. The other one is a fake, so the numbers are nobody's."""
    said = fresh_process(TENSOR_PARALLEL)
    assert said.splitlines()[-1] == "attnops.adapters.torchtitan [2, 16, 1024]"


def test_refusals_tell_the_door():
    said = "FlexAttention: its masks are functions of flex_attention.*attn_backend='varlen'"
    with pytest.raises(PatchError, match=said):
        attnops.patch(build(config(llama3, "flex")))
    with pytest.raises(PatchError, match="VarlenAttention: it calls attnops already"):
        attnops.patch(build(overridden(config(llama3, "varlen"))))
    wrapped = build(config(llama3, "varlen"))
    for layer in wrapped.layers.values():
        layer.attention.inner_attention.forward = lambda *_: None
    with pytest.raises(PatchError, match=re.escape(f"--override.imports {DOOR}")):
        attnops.patch(wrapped)
    inner, query = ours.varlen(theirs.VarlenAttention.Config()).build(), torch.randn(1, 4, 2, 16)
    with pytest.raises(InvalidInput, match="attention_masks"):
        inner(query, query, query, attention_masks=None)


def test_the_page():
    exec(block("model_registry"), {})
