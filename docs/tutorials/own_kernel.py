"""
A kernel of your own
====================

How to write a kernel in one file, register it, force it, see why it refuses a call, test it, and
ship it in a package.
"""

import torch

import attnops
from attnops.core.kernel import Kernel, device, register
from attnops.testing import CASES, check_kernel

# %%
# Write
# -----
#
# ``run`` gets one argument, the call: a record with the op's arguments under their names. It
# returns the op's results, here the attention ``[B, S, Hq, D]`` and an empty log-sum-exp: the
# kernel refuses calls that ask for one.


def run(call):
    group = call.query.shape[2] // call.key.shape[2]
    key, value = call.key.repeat_interleave(group, 2), call.value.repeat_interleave(group, 2)
    weights = torch.einsum("bqhd,bkhd->bhqk", call.query * call.scale, key).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).contiguous(), call.query.new_empty(
        0, dtype=torch.float32
    )


# %%
# Register
# --------
#
# ``takes`` is an allow list: the optional arguments that the kernel understands, here none. A call
# that asks for another is refused, so a feature that the op gains later cannot be dropped in
# silence. ``needs`` has every further demand. ``cost_us`` is an estimate in microseconds: of the
# kernels that can run, the one with the least is chosen. Ten milliseconds keep this one for calls
# that force it.

plain = register(
    Kernel(
        name="plain",
        op="attention",
        run=run,
        takes=frozenset(),
        dtypes=(torch.float32,),
        needs=(device("cpu"),),
        cost_us=lambda problem: 1e4,
        about="two einsums",
    )
)

# %%
# Force
# -----

query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 7, 2, 16)
forced = attnops.attention(query, key, key, kernel="plain")
torch.testing.assert_close(forced, attnops.attention(query, key, key, kernel="reference"))

# %%
# A call that the kernel does not take raises with the reasons of every kernel. No other kernel runs
# in its place.

try:
    attnops.attention(query, key, key, causal=True, kernel="plain")
except attnops.AttnopsError as error:
    print(str(error).splitlines()[0])
    print(error.decision.refused["plain"][0])
    assert error.decision.refused["plain"][0].field == "causal"
else:
    raise AssertionError("plain ran a causal call")

# %%
# Explain
# -------
#
# The kernel has a line wherever attnops lists kernels, ``attnops doctor`` included.

found = attnops.explain(lambda q, k: attnops.attention(q, k, k), query, key, quiet=True)
print("\n".join(line for line in str(found).splitlines() if "->" in line or "plain" in line))
assert "not plain: can run, estimated slower" in str(found)

# %%
# Test
# ----
#
# ``check_kernel`` compares with the reference in float64, fills what may not be read with NaN, and
# checks shapes, strides, dtypes, aliasing and mutation. ``CASES`` has the calls of every op. A case
# that the kernel refuses is not run. ``worst`` is the error as a share of the allowed one.

figures = {case.label: check_kernel(plain, case.call(seed=0)) for case in CASES["attention"]}
ran = [label for label, found in figures.items() if not found.refused]
worst = max(figures[label].worst for label in ran)
print(f"ran {len(ran)} of {len(figures)} cases, the worst error is {worst:.0%} of the allowed one")
assert ran and worst <= 1

# %%
# Ship
# ----
#
# A package names the module in an entry point. After ``pip install`` the kernel is there in every
# process that imports attnops:
#
# .. code-block:: toml
#
#    [project.entry-points."attnops.kernels"]
#    plain = "my_package.plain"
#
# ``examples/own_kernel_package`` of the repository is such a package with its test, ready to copy.
