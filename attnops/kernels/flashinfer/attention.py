"""`flashinfer`: FlashInfer's kernels (https://arxiv.org/abs/2501.01005) for paged and packed calls, on plans that the host makes.

Which of them runs (CUDA cores or tensor cores for decode, FA2 or FA3 for more queries) follows from numbers that do not change between
steps. Pages may hold anything past a request's end: all of them zero the values they load from there and replace the
logits. Data pointers must be 16-byte aligned, as torch allocates them.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.kernel import Capture, Invariant, Kernel, Need, Plan, Tolerance, arch, demand, deterministic, one_of, register
from attnops.kernels.flashinfer import modules as fi, plan_batch as planner
from attnops.kernels.flashinfer.modules import I32, Places, Shape
from attnops.kernels.flashinfer.package import HALVES, PACKAGE, gapless
from attnops.kernels.shared.flash import past, see_nothing, with_sinks
from attnops.kernels.shared.plan import cut, host_plan, read_header, within
from attnops.measured import Roofline, phases
from attnops.problem import Target
from attnops.reference.attention import no_lse

if TYPE_CHECKING:
    from attnops.ops.paged import PagedAttention
    from attnops.ops.varlen import VarlenAttention

LN2 = math.log(2.0)


def paged_attention(call: PagedAttention) -> None:
    """See `attnops.paged_attention`. The kernel writes every row of `output`: padding has a request of its own in the plan.

    The page ids it reads are the plan's, which has no holes: without the caller's promise it must have been made for this many pages.
    """
    query, output, lse = call.query, call.output, call.lse
    if not (query.numel() and call.k_pages.numel() and call.page_table.numel()):
        output.zero_()
        if lse is not None:
            lse.copy_(_natural(torch.full_like(lse, float("-inf")), call))
        return
    c = fi.layout_of(query.device, Target.of(query.device).arch, call.max_seqlen_q, Shape.of_layer(call))
    ints = read_header(call, planner.MAKER, c.shape, c.path, fi.NAMES, call.k_pages.shape[0])
    assert call.workspace is not None  # `read_header` looked
    at = Places._make(cut("workspace", call.workspace, c.sizes, I32))
    out, z = gapless(output), None if lse is None else gapless(lse)
    fi.run(c, at, ints, call, (query, call.k_pages, call.v_pages), out, z)
    if out is not output:
        output.copy_(out)
    if lse is not None and z is not None:
        lse.copy_(_natural(z, call)) if call.sinks is not None or z is not lse else lse.mul_(LN2)


def varlen_attention(call: VarlenAttention) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`. The op takes no plan, so every call copies the lengths to the host and plans."""
    query, key, value = call.query, call.key, call.value
    tokens, q_heads, head_dim = query.shape
    _, kv_heads, v_head_dim = value.shape
    output = query.new_empty((tokens, q_heads, v_head_dim))
    lse = query.new_empty((tokens, q_heads), dtype=torch.float32) if call.return_lse else None
    cu_q, cu_k = torch.stack([call.cu_seqlens_q, call.cu_seqlens_k]).cpu()
    for field, cu, most, rows in (("q", cu_q, call.max_seqlen_q, tokens), ("k", cu_k, call.max_seqlen_k, key.shape[0])):
        within(f"lengths of cu_seqlens_{field}", cu.diff(), most)
        within(f"cu_seqlens_{field}[-1]", cu[-1:], rows)
    used = int(cu_k[-1])
    if query.numel() and used:
        queries, keys = planner.ragged_tables(cu_q, cu_k, tokens, call.causal)
        shape = Shape(
            tokens, len(queries) - 1, 0, q_heads, kv_heads, head_dim, v_head_dim, 1, query.dtype, False, call.causal, call.window_left,
            call.softcap > 0, call.sinks is not None, deterministic(call.policy),
        )  # fmt: skip
        c = fi.layout_of(query.device, Target.of(query.device).arch, call.max_seqlen_q, shape)
        ints, at = planner.plan_ragged(c, queries, keys, query.device)
        # FA3 loads whole tiles of values, and a weight of 0 does not silence NaN: keys of no request are not shown to it.
        # Detached: the exchange of tensors with tvm_ffi refuses those of a training step, which want a gradient.
        fi.run(c, at, ints, call, (query.detach(), key[:used].detach(), value[:used].detach()), output, lse)
    else:
        see_nothing(output, lse)
    return output, no_lse(query) if lse is None else _natural(lse, call)


def _natural(z: Tensor, call: PagedAttention | VarlenAttention) -> Tensor:
    """lse `[T, Hq]` of base 2 -> natural; with sinks, theirs where no key is seen, and -inf for padding."""
    if call.sinks is None:
        return z * LN2
    return with_sinks(z * LN2, call.sinks).masked_fill(past(call.cu_seqlens_q, z.shape[0])[:, None], float("-inf"))


PLAN_US = 700.0
"""Host time of a plan, about; the shipped table's `plan_us` is measured. A step makes one plan, and every packed call makes one."""


PAGED = phases(Roofline(16.7, 1.2, 0.52, 0.00056, 28_000), Roofline(15.4, 0.47, 0.65, 0.0035))
PACKED = Roofline(281.0, 0.47, 0.65, 0.0035)
"""Its launches wait for a plan, which the host makes in every call."""


DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""The head dims that FlashInfer compiles, its merge of split keys included."""
NEEDS: tuple[Need, ...] = (
    arch(80, 86, 87, 89, 90, 100, 103, 120, 121),
    demand("head_dim, v_head_dim", "64 | 128 | 256, or 192 with 128", lambda p: (p.head_dim, p.v_head_dim) in DIMS),
    demand("window", "no right bound (but causal)", lambda p: p.causal or p.window[1] < 0),
    demand("softcap", "no (sinks)", lambda p: not (p.sinks and p.softcap)),  # the sink variant has no softcap
    one_of("last_dim_contiguous", True),
)
# One set of strides serves keys and values, but in FA2, the only one to take unlike head dims.
ALIKE = demand("pages_alike", "key and value pages of equal strides", lambda p: p.pages_alike or p.head_dim != p.v_head_dim)
TAKES = frozenset({"sinks", "causal", "window_left", "window_right", "softcap"})
# A compiled graph is split around these. Planning waits for the device. The paged kernels themselves can be captured, and are when a
# graph is captured by hand; but Inductor's recorder makes copies of a partition's inputs, and those of a CPU tensor, the plan, it
# frees while it keeps writing to them (torch/_inductor/cudagraph_trees.py, reconstructed_inputs, seen in 2.11 and 2.13).
# FA2 adds up the weights that its matrix units are given.
_flashinfer = functools.partial(
    Kernel, "flashinfer", dtypes=HALVES, packages=(PACKAGE,), capture=Capture.NEVER, tolerance=Tolerance(rounded_sums=True),
    invariant=Invariant(), about="FlashInfer: decode and prefill, FA2 and FA3, planned by the host",
)  # fmt: skip
_plan, _maker = Plan(sizes=planner.plan_sizes), host_plan(planner.MAKER)
register(_flashinfer("plan_paged_attention", planner.plan_paged_attention, needs=NEEDS, cost_us=lambda p: PLAN_US, plan=_plan))
register(_flashinfer("paged_attention", paged_attention, takes=TAKES | {"lse", "holes"}, needs=(*NEEDS, ALIKE, _maker), cost_us=PAGED))
register(_flashinfer("varlen_attention", varlen_attention, takes=TAKES | {"return_lse"}, needs=NEEDS, cost_us=PACKED))
