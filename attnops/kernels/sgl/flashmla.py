"""`flashmla` and `flashmla_fp8`: FlashMLA's dense decode (see sources.py) over latents of 512 + 64
on SM90, and its schedule.

Called without a schedule, the raw ops make it on the device from this call's lengths: no state, no
sync, and a captured graph follows its inputs. A plan of `decode_rows` made for the call's heads
holds one, and every layer starts one kernel less. Every query token is a row of its own: the raw
ops want the same number of queries of every request, and the contract lets them differ. The kernels
are lowered in place: the compiler joins the query's parts where they are made, and takes the raw
op's result for the output.

The half types' kernel itself gives 0 to a row without keys, so that padding needs no pass over the
output. The float8 kernel would read before the page table of such a row, so it is given one key,
whose results are dropped. The float8 kernel takes query and latents in float8_e4m3fn. Weights are
rounded to it before they meet the latents, and those below 2^-10 of the largest vanish: `tolerance`
says so.

A schedule says how the keys of all tokens are shared out among the multiprocessors. Both kernels
read it as int32 `[parts, 8]` and `[T + 1]`, the parts' entries aligned to 32 bytes. In a plan of
`decode_rows` it comes first, where every allocator aligns it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.errors import InvalidInput
from attnops.core.kernel import (
    Core,
    Inline,
    Invariant,
    Kernel,
    Plan,
    Tolerance,
    arch,
    demand,
    one_of,
    register,
)
from attnops.core.problem import Problem, Refusal
from attnops.kernels.sgl import sources
from attnops.kernels.sgl.sources import PACKAGE
from attnops.kernels.shared.tokens import (
    BY_TOKEN,
    LATENT,
    adjoin,
    batch_by_token,
    blank,
    rows,
    whole,
)
from attnops.measured import Roofline, phases
from attnops.ops.metadata import reference as data
from attnops.ops.metadata.reference import (
    MOST_SMS,
    PART_HEADS,
    PART_WORDS,
    rows_schedule_parts,
    rows_schedule_words,
)

if TYPE_CHECKING:
    from attnops.ops.latent import record as mla
    from attnops.ops.metadata import record as metadata

ALIGNMENT = PART_WORDS * 4
FLOAT8 = torch.float8_e4m3fn
MOST_FLOAT8_TOKENS = 4095
"""Rows that the metadata kernel of float8 has shared memory for (flash_fwd_mla_metadata.cu:
MaxBatchSize)."""


def mla_attention(call: mla.MlaAttention) -> None:
    """Both kernels. plan: from `decode_rows`, or None to make it here."""
    if blank(call):
        return
    float8 = call.q_nope.dtype == FLOAT8
    tables, lengths, schedule = batch_by_token(call, (float8,))
    given = (*adjoin(call.q_nope, call.q_pe), call.latent_pages, tables)
    if float8:
        out, z = torch.ops.attnops.mla_attention__flashmla_fp8(
            *given, lengths.clamp(min=1), schedule, call.scale, call.q_scale, call.kv_scale
        )
        out = out.masked_fill((lengths == 0)[:, None, None], 0.0)
    else:
        out, z = torch.ops.attnops.mla_attention__flashmla(*given, lengths, schedule, call.scale)
    call.output.copy_(out)
    if call.lse is not None:
        # The half types' kernel gives +inf where there is no key.
        call.lse.copy_(
            z.masked_fill((lengths == 0)[:, None] if float8 else z == float("inf"), float("-inf"))
        )


def _core(
    q_nope: Tensor,
    q_pe: Tensor | None,
    latent_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    schedule: Tensor | None,
    scale: float,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads = q_nope.shape[:2]
    # A single query at the last key it sees sees every key, causal or not.
    given = (
        whole(q_nope, q_pe)[:, None],
        latent_pages[:, :, None],
        LATENT,
        lengths,
        tables,
        scale,
        False,
    )
    made: tuple[Any, Any] = (None, None) if schedule is None else split(schedule, tokens, heads)
    if q_scale is None or kv_scale is None:
        out, z, _, _ = sources.op("dense_decode_fwd")(*given, *made)
    else:
        made = _schedule(lengths, heads, True) if schedule is None else made
        out, z = sources.op("fwd_kvcache_mla_fp8")(
            *given, *made, q_scale.contiguous(), kv_scale.contiguous()
        )
    return out[:, 0], z[:, :, 0]


def _fake_core(q_nope: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape, dtype = q_nope.shape[:2], torch.bfloat16 if q_nope.dtype == FLOAT8 else q_nope.dtype
    return q_nope.new_empty((*shape, LATENT), dtype=dtype), q_nope.new_empty(
        shape, dtype=torch.float32
    )


# The batch by token, and its schedule -------------------------------------------------------------


def decode_rows(call: metadata.DecodeRows) -> Tensor:
    """Only the vendor's op is opaque: the compiler fuses the torch ops around it."""
    tokens = call.num_tokens
    if not (call.q_heads and tokens and call.page_table.shape[0]):
        return data.decode_rows(call)
    rows = torch.ops.attnops.decode_rows.default(
        call.page_table, call.seq_lens, call.cu_seqlens_q, num_tokens=tokens, causal=call.causal
    )
    lengths = rows[:tokens]
    # The float8 kernel would read before the page table of a row without keys, so that it is given
    # one key.
    seen = lengths.clamp(min=1) if call.float8 else lengths
    return torch.cat(
        [torch.ops.attnops.decode_rows__flashmla(seen, call.q_heads, call.float8), rows]
    )


def _schedule(lengths: Tensor, q_heads: int, float8: bool) -> tuple[Tensor, Tensor]:
    """(parts, splits) as the kernels take them. lengths: int32 `[T]`, T at least 1; for float8 each
    at least 1."""
    if not float8:
        # As dense_decode_fwd makes it: the same kernel, blocks of keys, overhead and number of
        # parts.
        return sources.op("get_mla_decoding_metadata")(lengths, q_heads, 1, q_heads, False, None)  # type: ignore[no-any-return]
    if lengths.shape[0] > MOST_FLOAT8_TOKENS:
        raise InvalidInput(
            "q_nope.shape[0]", lengths.shape[0], f"<= {MOST_FLOAT8_TOKENS} tokens (flashmla_fp8)"
        )
    return sources.op("get_mla_decoding_metadata_dense_fp8")(lengths, q_heads, 1)  # type: ignore[no-any-return]


def written(lengths: Tensor, q_heads: int, float8: bool) -> Tensor:
    """As in a plan: `[rows_schedule_words(T, q_heads, float8)]`, 0 past the parts of this GPU and
    in words that no kernel reads."""
    parts, splits = _schedule(lengths, q_heads, float8)
    room = rows_schedule_parts(q_heads, float8)
    if parts.shape[0] > room:
        raise InvalidInput(
            "multiprocessors",
            parts.shape[0] * -(-q_heads // PART_HEADS),
            f"<= {MOST_SMS}, all there can be on sm90",
        )
    # The metadata kernels leave an entry's last words as they find them, and equal batches shall
    # have equal plans.
    used = parts[:, : 5 if float8 else 7]
    return torch.cat(
        [pad(used, (0, PART_WORDS - used.shape[1], 0, room - parts.shape[0])).flatten(), splits]
    )


def split(schedule: Tensor, tokens: int, q_heads: int) -> tuple[Tensor, Tensor]:
    """The result of `written` as views (parts, splits). Raises InvalidInput unless the kernel may
    read whole entries from its start."""
    if schedule.data_ptr() % ALIGNMENT:
        raise InvalidInput(
            "plan",
            f"{schedule.data_ptr():#x}",
            f"to begin at a multiple of {ALIGNMENT} bytes, as decode_rows made it",
        )
    parts = max(_multiprocessors(schedule.device) // -(-q_heads // PART_HEADS), 1)
    return schedule[: parts * PART_WORDS].view(parts, PART_WORDS), schedule[
        schedule.shape[0] - tokens - 1 :
    ]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # Off CUDA only stand-ins read schedules.
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


# The room of a float8 schedule. A size without a known bound is checked when the kernel is called.
few_tokens = demand(
    "tokens",
    f"<= {MOST_FLOAT8_TOKENS}",
    lambda p: p.dtype != FLOAT8 or (p.sizes.tokens.hi or 0) <= MOST_FLOAT8_TOKENS,
)


def _unread(p: Problem) -> Refusal | None:
    """flashmla computes no output from a schedule of zeros, so the reference, which writes zeros,
    is refused where flashmla may run."""
    if few_tokens(p) is not None:
        return None  # flashmla_fp8 has the same need and cannot run
    if (
        not p.q_heads
        or p.target.device != "cuda"
        or p.target.arch != 90
        or PACKAGE.missing(p.target)
    ):
        return None
    return Refusal("q_heads", p.q_heads, "0 where flashmla is: its schedule is made by flashmla")


PLANNED = phases(Roofline(23.2, 1.2, 1.1, 0.0013, 25_000), Roofline(16.3, 0.19, 1.0, 0.0046, 2700))
# No table has times of float8: as the other kernel where they are alike.
PLANNED_FP8 = Roofline(24.0, 0.75, 1.0, 0.0013, 25_000)


def rows_us(p: Problem) -> float:
    """The time of rows and schedule in each layer of a call without a plan: measured for 64 tokens,
    where the schedule takes 26.

    A host's planner plans for the kernel that is chosen, so that a call of this kernel with a
    host's plan has its own.
    """
    return 20.0 + 0.16 * max(p.sizes.tokens.hint, 1) if p.step.plan == "none" else 0.0


def _cost_us(p: Problem) -> float:
    return (PLANNED_FP8 if p.dtype == FLOAT8 else PLANNED)(p) + rows_us(p)


CORE = Core(
    "(Tensor q_nope, Tensor? q_pe, Tensor latent_pages, Tensor tables, Tensor lengths, Tensor? "
    "schedule, float scale, "
    "Tensor? q_scale=None, Tensor? kv_scale=None) -> (Tensor output, Tensor lse)",
    _core,
    _fake_core,
)
ROWS_CORE = Core(
    "(Tensor lengths, int q_heads, bool float8) -> Tensor",
    written,
    lambda lengths, q_heads, float8: lengths.new_empty(
        rows_schedule_words(lengths.shape[0], q_heads, float8)
    ),
)
_dense = functools.partial(
    Kernel,
    op="mla_attention",
    run=mla_attention,
    needs=(arch(90), *BY_TOKEN, one_of("page_size", 64), few_tokens),
    packages=(PACKAGE,),
    cost_us=_cost_us,
    plan=Plan(device=functools.partial(rows, schedule=True)),
    inline=Inline(core=CORE),
)
TAKES, HALVES = frozenset({"causal", "lse"}), (torch.float16, torch.bfloat16)
register(_dense("flashmla", takes=TAKES, dtypes=HALVES, about="FlashMLA dense decode"))
register(
    _dense(
        "flashmla_fp8",
        takes=TAKES | {"q_scale", "kv_scale"},
        dtypes=(FLOAT8,),
        kv_dtypes=(FLOAT8,),
        tolerance=Tolerance(16.0, rounded_sums=True),
        about="FlashMLA dense decode in float8",
    )
)
# The dtype is that of the page table, or of the float8 query that the schedule is for. Rows depend
# on their own request alone. The schedule depends on all requests, and so do the results of
# flashmla.
_rows = functools.partial(
    Kernel, op="decode_rows", dtypes=(torch.int32, FLOAT8), invariant=Invariant()
)
register(
    _rows(
        "flashmla",
        run=decode_rows,
        needs=(arch(90), few_tokens),
        packages=(PACKAGE,),
        inline=Inline(core=ROWS_CORE),
        cost_us=lambda p: (
            5.0
        ),  # more than the reference, whose body serves a call without a schedule
        about="the batch by token with FlashMLA's schedule",
    )
)
register(
    _rows(
        "reference",
        run=data.decode_rows,
        needs=(_unread,),
        cost_us=lambda p: 4.0,
        inline=Inline(),
        about="plain torch; a schedule is zeros, which no kernel reads",
    )
)
