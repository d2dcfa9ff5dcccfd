"""`triton`, of linear layers: up to 64 rows, with norm, activation and residual in the launch that
reads the weight."""

from __future__ import annotations

import torch

from attnops.core.kernel import demand, one_of
from attnops.core.problem import Problem, Refusal
from attnops.kernels.shared.linear import TAKES, product_us
from attnops.kernels.triton.attention import launched, own
from attnops.kernels.triton.launch.linear_tiles import MOST_ROWS

COLUMN_US = {
    8: (0.0009, 0.0026),
    16: (0.0017, 0.0026),
    32: (0.0021, 0.0038),
    MOST_ROWS: (0.0037, 0.0085),
}
"""By rows of a program, the time of a column, without and with a norm: a program reads all columns
in turn. Fitted to times on an H200."""


def _cost_us(p: Problem) -> float:
    """A launch, then the bytes or the columns."""
    rows = max(p.sizes.tokens.hint, 1)
    if rows == 1:
        return 2.8 + product_us(p, rows)
    block = next((n for n in COLUMN_US if rows <= n), MOST_ROWS)
    columns = p.in_features * (
        2 if "activation" in p.asks else 1
    )  # a program reads two rows of the weight for a result
    return 3.8 + max(
        product_us(p, max(rows, block)), columns * COLUMN_US[block]["norm_weight" in p.asks]
    )


def _few(p: Problem) -> bool:
    most = p.sizes.tokens.hi
    return p.step.deterministic or (most is not None and most <= MOST_ROWS)


def _finite(p: Problem) -> Refusal | None:
    if p.dtype != torch.float16 or "norm_weight" not in p.asks:
        return None
    return Refusal(
        "norm_weight",
        "a norm of float16",
        "bfloat16 | float32: the input times its gain, unscaled, may overflow",
    )


NEEDS = (
    one_of("last_dim_contiguous", True),
    demand("tokens", f"<= {MOST_ROWS}, of which its tiles are", _few),
    _finite,
)
own(
    "linear",
    launched("linear", "linear"),
    _cost_us,
    "attnops' own, up to 64 rows",
    TAKES,
    needs=NEEDS,
)
