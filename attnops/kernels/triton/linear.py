"""Linear layers. `triton`: up to 64 rows, with norm, activation and residual in the launch that
reads the weight. `triton_aten`: more rows, torch's product between launches of these parts. And
norms alone, with their residual, in one launch."""

from __future__ import annotations

import torch

from attnops.core.kernel import Kernel, arch_from, demand, one_of, register
from attnops.core.problem import Problem, Refusal
from attnops.kernels.shared.linear import NORM_TAKES, TAKES, norm_us, product_us
from attnops.kernels.triton.attention import PACKAGE, launched, own
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

MOST_COLUMNS = 16384
"""A program holds a row of the norm."""


def _holds_a_row(p: Problem) -> bool:
    return p.in_features <= MOST_COLUMNS


def _norm_us(p: Problem) -> float:
    """A launch, which takes longer than that of a compiler, whose launch may hold the neighbours,
    too; not measured."""
    return (4.0 if p.step.compiled else 2.5) + norm_us(p)


own(
    "rms_norm",
    launched("linear", "rms_norm"),
    _norm_us,
    "attnops' own, a row a program",
    NORM_TAKES,
    needs=(
        one_of("last_dim_contiguous", True),
        demand("in_features", f"<= {MOST_COLUMNS}", _holds_a_row),
    ),
)

LAUNCHED_US, FUSED_US = 1.5, 4.0
"""Of a part beside the product: a launch, and more than a compiler takes that fuses torch's own
ops."""


def _around_us(p: Problem) -> float:
    """A launch for the product, and one for each part around it; not measured."""
    rows = max(p.sizes.tokens.hint, 1)
    each = FUSED_US if p.step.compiled else LAUNCHED_US
    parts = p.asks & {"norm_weight", "activation", "residual"}
    return 4.0 + product_us(p, rows) + each * len(parts)


def _many(p: Problem) -> bool:
    return p.sizes.tokens.lo > MOST_ROWS


def _holds_its_norm(p: Problem) -> bool:
    return "norm_weight" not in p.asks or _holds_a_row(p)


def _has_parts(p: Problem) -> Refusal | None:
    if p.asks & {"norm_weight", "activation"}:
        return None
    want = "a norm or an activation: a product alone is left to aten"
    return Refusal("norm_weight", "no norm and no activation", want)


_AROUND = launched("linear", "around_product")
register(
    Kernel(
        "triton_aten",
        "linear",
        _AROUND,
        TAKES,
        # Products of float16 saturate in `aten` before they are multiplied.
        (torch.bfloat16, torch.float32),
        needs=(
            arch_from(80),
            one_of("last_dim_contiguous", True),
            demand("tokens", f"> {MOST_ROWS}: fewer are left to `triton`", _many),
            demand("in_features", f"<= {MOST_COLUMNS}, with a norm", _holds_its_norm),
            _has_parts,
        ),
        packages=(PACKAGE,),
        cost_us=_around_us,
        ahead=_AROUND.ahead,
        about="torch's product, with a launch for the norm and one for the activation",
    )
)
