"""Numbers that rounding is tried with. In a module of its own: the GPU host need not have what the
other tests import."""

import torch

from attnops.ops.case_data import E4M3, E5M2, F32, U8

EDGES = (E4M3, E5M2)


def every_number(dtype, heads, dim):
    """Float numbers `[T, heads, dim]`: all of a two-byte dtype that are finite, or float32 between
    and on all edges of float8."""
    if dtype != F32:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        x = x[x.isfinite()]
    else:
        edges = torch.cat([torch.arange(256, dtype=U8).view(d).float() for d in EDGES])
        edges = torch.cat([edges[edges.isfinite()], torch.arange(-130, 130).float()]).sort().values
        x = torch.cat([edges, (edges[1:] + edges[:-1]) / 2])
        x = torch.cat(
            [
                x,
                torch.nextafter(x, x + 1),
                torch.nextafter(x, x - 1),
                x * 1e-30,
                torch.tensor([3e38, -3e38, 1e-45]),
            ]
        )
    rows = -(-x.numel() // (heads * dim))
    return (
        torch.nn.functional.pad(x.float(), (0, rows * heads * dim - x.numel()))
        .to(dtype)
        .reshape(rows, heads, dim)
    )
