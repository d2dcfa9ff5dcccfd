"""FlashMLA's schedule of a dense decode: how the keys of all tokens are shared out among the multiprocessors.

Both dense decodes read it as int32 `[parts, 8]` and `[T + 1]`, the parts' entries aligned to 32 bytes, and make it of their lengths
before they start unless it is given. In a plan of `decode_rows` it comes first, where every allocator aligns it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.errors import InvalidInput
from attnops.kernels.sgl import wheel
from attnops.problem import Problem, Refusal, Target
from attnops.reference.data import MOST_SMS, PART_HEADS, PART_WORDS, rows_schedule_parts

LIBRARY = "flashmla_ops.*"
PACKAGE = wheel.package("0.4.3")
ALIGNMENT = PART_WORDS * 4
MOST_FLOAT8_TOKENS = 4095
"""Rows that the metadata kernel of float8 has shared memory for (flash_fwd_mla_metadata.cu: MaxBatchSize)."""


def missing(target: Target) -> Refusal | None:
    """The probe of all FlashMLA kernels."""
    return wheel.lacks(target, LIBRARY)


def made(lengths: Tensor, q_heads: int, float8: bool) -> tuple[Tensor, Tensor]:
    """(parts, splits) as the kernels take them. lengths: int32 `[T]`, T at least 1; for float8 each at least 1."""
    if not float8:
        # As dense_decode_fwd makes it: the same kernel, blocks of keys, overhead and number of parts.
        wheel.load("get_mla_decoding_metadata", LIBRARY)
        parts, splits = torch.ops.sgl_kernel.get_mla_decoding_metadata(lengths, q_heads, 1, q_heads, False, None)
    else:
        wheel.load("get_mla_decoding_metadata_dense_fp8", LIBRARY)
        if lengths.shape[0] > MOST_FLOAT8_TOKENS:
            raise InvalidInput("q_nope.shape[0]", lengths.shape[0], f"<= {MOST_FLOAT8_TOKENS} tokens (flashmla_fp8)")
        parts, splits = torch.ops.sgl_kernel.get_mla_decoding_metadata_dense_fp8(lengths, q_heads, 1)
    return parts, splits


def written(lengths: Tensor, q_heads: int, float8: bool) -> Tensor:
    """As in a plan: `[rows_schedule_words(T, q_heads, float8)]`, 0 past the parts of this GPU and in words that no kernel reads."""
    parts, splits = made(lengths, q_heads, float8)
    room = rows_schedule_parts(q_heads, float8)
    if parts.shape[0] > room:
        raise InvalidInput("multiprocessors", parts.shape[0] * -(-q_heads // PART_HEADS), f"<= {MOST_SMS}, all there can be on sm90")
    # The metadata kernels leave an entry's last words as they find them, and equal batches shall have equal plans.
    used = parts[:, : 5 if float8 else 7]
    return torch.cat([pad(used, (0, PART_WORDS - used.shape[1], 0, room - parts.shape[0])).flatten(), splits])


def split(schedule: Tensor, tokens: int, q_heads: int) -> tuple[Tensor, Tensor]:
    """The result of `written` as views (parts, splits). Raises InvalidInput unless the kernel may read whole entries from its start."""
    if schedule.data_ptr() % ALIGNMENT:
        raise InvalidInput("plan", f"{schedule.data_ptr():#x}", f"to begin at a multiple of {ALIGNMENT} bytes, as decode_rows made it")
    parts = max(_multiprocessors(schedule.device) // -(-q_heads // PART_HEADS), 1)
    return schedule[: parts * PART_WORDS].view(parts, PART_WORDS), schedule[schedule.shape[0] - tokens - 1 :]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # Off CUDA only stand-ins read schedules.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def few_tokens(p: Problem) -> Refusal | None:
    """The room of `made` in float8. A size without a known bound is checked when the kernel is called."""
    if p.dtype != torch.float8_e4m3fn or p.tokens.hi is None or p.tokens.hi <= MOST_FLOAT8_TOKENS:
        return None
    return Refusal("tokens", p.tokens, f"<= {MOST_FLOAT8_TOKENS}")


def cost_us(p: Problem) -> float:
    """The time of rows and schedule in each layer of a call without a plan: measured for 64 tokens, where the schedule takes 26.

    A host's planner plans for the kernel that is chosen, so that a call of this kernel with a host's plan has its own.
    """
    return 20.0 + 0.16 * max(p.tokens.hint, 1) if p.plan == "none" else 0.0
