"""Plans made by the host: the header that names a plan's kernel and call, and how a buffer is cut
up.

A plan is an int64 tensor on the CPU. Its first HEADER numbers are

    MAGIC, path, number of fields, number of ints, pages of the pool, the fields, the ints

where `path` is the maker's own number for the kernel it planned for (never 0), the fields are the
call the plan was made for, and the ints are those that the foreign planner returned. The pages are
`holes.UNKNOWN` where the maker was given none. The maker's staging memory follows the header. A
plan of zeros is no plan.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput
from attnops.core.kernel import Need, demand
from attnops.ops.metadata.reference import UNKNOWN

HEADER = 64
FORMAT = 2
MAGIC = 0x6174_6E6F_7073_0000 + FORMAT
FIRST = 5

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
ALIGN = 256


def whole_table(call: Any, num_pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """The page table and the lengths of a call without holes, from which its plan is made."""
    left = getattr(call, "window_left", -1)
    return torch.ops.attnops.named_pages.default(  # type: ignore[no-any-return]
        call.page_table,
        call.seq_lens,
        call.cu_seqlens_q,
        num_pages=num_pages,
        page_size=page_size,
        squeeze=left < 0,
        window_left=left,
    )


def lengths_of(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(page table without holes, its lengths, the lengths and cu_seqlens_q on the CPU) of a plan
    op's call. Where the call brings none for the host, it waits for the stream.

    Raises InvalidInput for a length with which the kernels would read past the tables.
    """
    keys, cu_seqlens = call.seq_lens_cpu, call.cu_seqlens_q_cpu
    if keys is None:
        table, seq_lens = whole_table(call, call.num_pages, call.page_size)
        both = torch.cat([seq_lens, call.cu_seqlens_q]).cpu()
        keys, cu_seqlens = both.split([seq_lens.shape[0], call.cu_seqlens_q.shape[0]])
    else:
        table, seq_lens = call.page_table, call.seq_lens
    within("seq_lens", keys, call.page_table.shape[1] * call.page_size)
    within("lengths of cu_seqlens_q", cu_seqlens.diff(), call.max_seqlen_q)
    within("cu_seqlens_q[-1]", cu_seqlens[-1:], call.num_tokens)
    return table, seq_lens, keys, cu_seqlens


def staging_of(call: Any, size: int) -> Tensor:
    """uint8 `[size]` on the host, from which a plan is copied to the device: the end of `plan`.

    A call that does not wait may come before the copies of the plan before it are done, so it gets
    memory of its own. Copy from it by torch at last: torch hands out pinned memory again once its
    own copies from it are done.
    """
    [staging] = cut("plan", call.plan[HEADER:].view(torch.uint8), (size,), torch.uint8)
    device = call.page_table.device.type
    if call.seq_lens_cpu is None and (device != "cuda" or staging.is_pinned()):
        return staging
    return torch.empty_like(staging, pin_memory=device == "cuda")


def within(field: str, lengths: Tensor, most: int) -> None:
    """Raise InvalidInput unless lengths on the CPU are from 0 to `most`."""
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise InvalidInput(field, lengths.tolist(), f"0 <= each <= {most}")


@functools.lru_cache(maxsize=1024)
def fields_of(shape: tuple[Any, ...]) -> list[int]:
    """The numbers of a named tuple as a header holds them. Raises InvalidInput for a dtype that no
    plan is made for."""
    for value in shape:
        if isinstance(value, torch.dtype) and value not in DTYPES:
            raise InvalidInput(
                "dtype", value, " | ".join(str(d).removeprefix("torch.") for d in DTYPES)
            )
    return [DTYPES.index(v) if isinstance(v, torch.dtype) else int(v) for v in shape]


def write_header(
    plan: Tensor, path: int, num_pages: int, shape: tuple[Any, ...], ints: Sequence[int]
) -> None:
    """Write the header. `plan`: int64 `[>= HEADER]` on the CPU. shape: the call it was made for, a
    named tuple."""
    fields = fields_of(shape)
    numbers = [MAGIC, path, len(fields), len(ints), num_pages, *fields, *map(int, ints)]
    if len(numbers) > HEADER:
        raise InvalidInput("plan header", f"{len(numbers)} numbers", f"<= {HEADER}")
    plan[:HEADER] = torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def read_header(
    call: Any, maker: str, shape: Any, path: int, paths: Mapping[int, str], num_pages: int
) -> list[int]:
    """The ints of a plan that was made for this call. No sync: the plan is on the CPU.

    Args:
        call: its plan, workspace and holes are looked at.
        maker: the op that makes such plans, for messages.
        shape: the call, as `write_header` was given it.
        path: the call's. paths: their names.
        num_pages: pages of the pool.

    Raises:
        InvalidInput: there is no plan, it has another format, or it was made for another call; the
            message names the field.
    """
    plan, want = call.plan, f"the plan that {maker} made for this batch"
    if plan is None:
        raise InvalidInput("plan", "none", want)
    numbers = plan[:HEADER].tolist()
    if len(numbers) < HEADER or numbers[0] != MAGIC:
        found = "no header" if not any(numbers) else "another header"
        raise InvalidInput(
            "plan", f"int64 {tuple(plan.shape)} with {found}", f"{want} (format {FORMAT})"
        )
    made_path, count, ints, pages = numbers[1:FIRST]
    made, fields = numbers[FIRST : FIRST + count], fields_of(shape)
    if made != fields:
        raise _of_another_call(shape, count, made, fields, want)
    if call.holes and pages != num_pages:
        want = f"{num_pages}, the pages of this call: give them to {maker}, or promise holes=False"
        raise InvalidInput("plan.num_pages", "unknown" if pages == UNKNOWN else pages, want)
    if made_path != path:
        want = f"{paths[path]}: the plan was made for another kernel or another max_seqlen_q"
        raise InvalidInput("plan.path", paths.get(made_path, made_path), want)
    if call.workspace is None:
        raise InvalidInput(
            "workspace", "None", f"the workspace that {maker} was given with this plan"
        )
    return numbers[FIRST + count : FIRST + count + ints]  # type: ignore[no-any-return]


def _of_another_call(
    shape: Any, count: int, made: list[int], fields: list[int], want: str
) -> InvalidInput:
    """count: the fields of the plan by its header, which may be more than there are."""
    if count != len(fields):
        return InvalidInput("plan", f"a plan of {count} fields", f"{len(fields)}: {want}")
    name, got, own = next(x for x in zip(shape._fields, made, fields, strict=True) if x[1] != x[2])
    return InvalidInput(f"plan.{name}", _shown(name, got), f"{_shown(name, own)}, as in this call")


def _shown(name: str, value: int) -> str:
    return str(DTYPES[value]).removeprefix("torch.") if name.endswith("dtype") else str(value)


def host_plan(maker: str) -> Need:
    """The need of a kernel that runs on a plan of the host: Problem.step.plan == "host"."""
    return demand("plan", f"host: {maker}", lambda p: p.step.plan == "host")


def padded(size: int, dtype: torch.dtype) -> int:
    """So many numbers, and those up to the next multiple of ALIGN bytes."""
    unit = ALIGN // dtype.itemsize
    return -(-size // unit) * unit


def cut(field: str, buffer: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """`buffer`, uint8, in pieces of so many numbers, one after the other: calls of the same sizes
    find the same addresses.

    Raises InvalidInput when the buffer is too short.
    """
    used = dtype.itemsize * sum(sizes)
    if buffer.numel() < used:
        raise InvalidInput(
            field, f"{buffer.numel()} bytes", f">= {used}: the sizes that its plan_sizes give"
        )
    # One split: views one by one would cost more than the rest of a call.
    return buffer[:used].view(dtype).split_with_sizes(sizes)
