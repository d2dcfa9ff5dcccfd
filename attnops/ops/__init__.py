"""The ops: contracts in torch.library form, one family a file, and the functions users call."""

from inspect import isfunction

from attnops.core.errors import NOT_SCRIPTED
from attnops.core.op import OPS as OPS, Op as Op, decompositions as decompositions
from attnops.ops.attention.merge import merge_state as merge_state, merge_states as merge_states
from attnops.ops.attention.record import attention as attention
from attnops.ops.attention.varlen import varlen_attention as varlen_attention
from attnops.ops.experts.mxfp4 import mxfp4_experts as mxfp4_experts
from attnops.ops.experts.record import experts as experts
from attnops.ops.experts.route import route as route
from attnops.ops.latent.record import (
    mla_attention as mla_attention,
    rope_quantize_latent as rope_quantize_latent,
    write_latent as write_latent,
)
from attnops.ops.linear.norm import rms_norm as rms_norm
from attnops.ops.linear.record import linear as linear
from attnops.ops.metadata.record import (
    cu_seqlens as cu_seqlens,
    decode_rows as decode_rows,
    kv_indices as kv_indices,
    named_pages as named_pages,
    request_starts as request_starts,
    slot_mapping as slot_mapping,
    token_rows as token_rows,
)
from attnops.ops.pages.decode import decode_attention as decode_attention
from attnops.ops.pages.plan import (
    latent_layers as latent_layers,
    paged_layers as paged_layers,
    plan_mla_attention as plan_mla_attention,
    plan_paged_attention as plan_paged_attention,
    plan_sizes as plan_sizes,
)
from attnops.ops.pages.record import (
    copy_kv as copy_kv,
    paged_attention as paged_attention,
    write_kv as write_kv,
)
from attnops.ops.pages.rotate import rotate_and_write_kv as rotate_and_write_kv
from attnops.ops.recurrent.conv import causal_conv1d as causal_conv1d
from attnops.ops.recurrent.record import gated_delta_rule as gated_delta_rule
from attnops.ops.recurrent.scan import mamba2_scan as mamba2_scan
from attnops.ops.sparse.record import (
    sparse_mla_attention as sparse_mla_attention,
    write_latent_packed as write_latent_packed,
)
from attnops.ops.sparse.vertical_slash import (
    vertical_slash_attention as vertical_slash_attention,
    vertical_slash_indexes as vertical_slash_indexes,
)
from attnops.ops.speculation.record import accept as accept, lookup_drafts as lookup_drafts
from attnops.ops.speculation.rows import advance_rows as advance_rows, next_inputs as next_inputs
from attnops.ops.speculation.sampled import accept_sampled as accept_sampled
from attnops.ops.speculation.tree import build_tree as build_tree, tree_mask as tree_mask

for _name, _value in [*globals().items()]:
    if isfunction(_value) and _value.__module__.startswith("attnops."):
        # What torch.jit.script says of a function that it meets.
        _text = f"{_name}: got torch.jit.script, want {NOT_SCRIPTED}"
        setattr(_value, "__script_unsupported", _text)
