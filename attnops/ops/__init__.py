"""The ops: contracts in torch.library form, one family a file, and the functions users call."""

from attnops.ops._op import OPS as OPS
from attnops.ops._op import Op as Op
from attnops.ops.by_token import decode_rows as decode_rows
from attnops.ops.dense import attention as attention
from attnops.ops.latent import write_latent as write_latent
from attnops.ops.merge import merge_state as merge_state
from attnops.ops.metadata import cu_seqlens as cu_seqlens
from attnops.ops.metadata import kv_indices as kv_indices
from attnops.ops.metadata import num_kv_splits as num_kv_splits
from attnops.ops.metadata import page_table as page_table
from attnops.ops.metadata import slot_mapping as slot_mapping
from attnops.ops.metadata import token_rows as token_rows
from attnops.ops.mla import mla_attention as mla_attention
from attnops.ops.paged import paged_attention as paged_attention
from attnops.ops.paged import write_kv as write_kv
from attnops.ops.plan import PagedSpec as PagedSpec
from attnops.ops.plan import plan_paged_attention as plan_paged_attention
from attnops.ops.plan import plan_sizes as plan_sizes
from attnops.ops.plan_mla import LatentSpec as LatentSpec
from attnops.ops.plan_mla import plan_mla_attention as plan_mla_attention
from attnops.ops.plan_mla import plan_mla_sizes as plan_mla_sizes
from attnops.ops.varlen import varlen_attention as varlen_attention
