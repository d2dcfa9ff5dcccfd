"""Plans made by the host: the header that says what a plan is and what it was made for, and how one workspace is cut up.

A plan is an int64 tensor on the CPU. Its first HEADER numbers are

    MAGIC, path, number of fields, number of ints, pages of the pool, the fields, the ints

where `path` is the maker's own number for what it planned (never 0), the fields are the call the plan was made for, and the ints are
what the foreign planner returned. The pages are `holes.UNKNOWN` where the maker was given none. What follows the header is the maker's
staging memory. A plan of zeros is no plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import Need
from attnops.problem import Problem, Refusal
from attnops.reference.holes import UNKNOWN

HEADER = 64
FORMAT = 2
MAGIC = 0x6174_6E6F_7073_0000 + FORMAT
FIRST = 5

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
ALIGN = 256


def whole_table(
    page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, num_pages: int, page_size: int, window_left: int = -1
) -> tuple[Tensor, Tensor]:
    """The table and lengths that a plan is made of: without holes."""
    named, lengths = torch.ops.attnops.named_pages.default(
        page_table, seq_lens, cu_seqlens_q, num_pages=num_pages, page_size=page_size, squeeze=window_left < 0, window_left=window_left
    )
    return named, lengths


def write_header(plan: Tensor, path: int, num_pages: int, fields: Sequence[int], ints: Sequence[int]) -> None:
    """Say what the plan is. `plan`: int64 `[>= HEADER]` on the CPU. The rest of the header becomes 0."""
    numbers = [MAGIC, path, len(fields), len(ints), num_pages, *map(int, fields), *map(int, ints)]
    if len(numbers) > HEADER:
        raise InvalidInput("plan header", f"{len(numbers)} numbers", f"<= {HEADER}")
    plan[:HEADER] = torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def read_header(
    plan: Tensor | None, maker: str, names: Sequence[str], fields: Sequence[int], num_pages: int | None
) -> tuple[int, list[int]]:
    """(path, ints) of a plan that was made for this call. No sync: the plan lies on the CPU.

    maker: the op that makes such plans, for messages. names, fields: the call, as `write_header` was told. num_pages: pages of the pool;
    None where the caller promises a table without holes.
    Raises InvalidInput: there is no plan, it is of another format, or it was made for another call; the message names the field.
    """
    if plan is None:
        raise InvalidInput("plan", "none", f"what {maker} made for this batch")
    numbers = plan[:HEADER].tolist()
    if len(numbers) < HEADER or numbers[0] != MAGIC:
        found = "no header" if not any(numbers) else "another header"
        raise InvalidInput("plan", f"int64 {tuple(plan.shape)} with {found}", f"what {maker} made for this batch (format {FORMAT})")
    path, count, ints, pages = numbers[1:FIRST]
    made = numbers[FIRST : FIRST + count]
    if made != list(fields):
        if count != len(fields):
            raise InvalidInput("plan", f"a plan of {count} fields", f"{len(fields)}: what {maker} made for this batch")
        at = next(i for i, (a, b) in enumerate(zip(made, fields, strict=True)) if a != b)
        raise InvalidInput(f"plan.{names[at]}", shown(names[at], made[at]), f"{shown(names[at], fields[at])}, as in this call")
    if num_pages is not None and pages != num_pages:
        want = f"{num_pages}, the pages of this call: give them to {maker}, or promise holes=False"
        raise InvalidInput("plan.num_pages", "unknown" if pages == UNKNOWN else pages, want)
    return path, numbers[FIRST + count : FIRST + count + ints]


def shown(name: str, value: int) -> str:
    """A field as a reader knows it."""
    return str(DTYPES[value]).removeprefix("torch.") if name.endswith("dtype") else str(value)


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype in a header. Raises InvalidInput for one that no plan is made for."""
    if dtype not in DTYPES:
        raise InvalidInput("dtype", dtype, " | ".join(str(d).removeprefix("torch.") for d in DTYPES))
    return DTYPES.index(dtype)


def host_plan(maker: str) -> Need:
    """The need of a kernel that runs on a plan of the host: Problem.plan == "host"."""

    def need(p: Problem) -> Refusal | None:
        return None if p.plan == "host" else Refusal("plan", p.plan, f"host: {maker}")

    return need


def within(field: str, lengths: Tensor, most: int) -> None:
    """Raises InvalidInput for a length, on the CPU, that the kernels would read past the tables with."""
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise InvalidInput(field, lengths.tolist(), f"0 <= each <= {most}")


class Cutter:
    """Cuts one byte buffer into aligned pieces, one after the other; without a buffer it only counts.

    used: bytes up to the end of the last piece. starts: where each piece starts, in bytes. Raises InvalidInput when the buffer is too
    small.
    """

    def __init__(self, field: str, buffer: Tensor | None = None) -> None:
        self.field, self.buffer, self.used = field, buffer, 0
        self.starts: list[int] = []

    def cut(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The next `size` numbers of `dtype`; when counting, an empty tensor."""
        start = -(-self.used // ALIGN) * ALIGN
        self.starts.append(start)
        self.used = start + size * dtype.itemsize
        if self.buffer is None:
            return torch.empty(0, dtype=dtype)
        if self.used > self.buffer.numel():
            raise InvalidInput(self.field, f"{self.buffer.numel()} bytes", f">= {self.used}: the sizes that its plan_sizes give")
        return self.buffer[start : self.used].view(dtype)
