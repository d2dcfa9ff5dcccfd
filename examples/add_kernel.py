"""A kernel in one file: register it, force it, see why it refuses, and test it against the contract.

python examples/add_kernel.py
"""

import torch

import attnops
from attnops.kernel import Kernel, device, register
from attnops.testing import CASES, check_kernel


def run(call):
    """Attention of `[B, S, Hq, D]` as two einsums. `takes` and `needs` keep all other calls away."""
    group = call.query.shape[2] // call.key.shape[2]
    key, value = call.key.repeat_interleave(group, 2), call.value.repeat_interleave(group, 2)
    weights = torch.einsum("bqhd,bkhd->bhqk", call.query * call.scale, key).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).contiguous(), call.query.new_empty(0, dtype=torch.float32)


PLAIN = Kernel(
    name="plain",
    op="attention",
    run=run,
    takes=frozenset(),
    dtypes=(torch.float32,),
    needs=(device("cpu"),),
    about="two einsums",
)


def main() -> None:
    register(PLAIN)
    query, key = torch.randn(1, 5, 4, 16), torch.randn(1, 7, 2, 16)

    forced = attnops.attention(query, key, key, kernel="plain")
    torch.testing.assert_close(forced, attnops.attention(query, key, key, kernel="reference"))
    attnops.explain(lambda q, k: attnops.attention(q, k, k, causal=True), query, key)
    try:
        attnops.attention(query, key, key, causal=True, kernel="plain")
    except attnops.AttnopsError as error:
        print("\n" + str(error).splitlines()[0])

    figures = {case.label: check_kernel(PLAIN, case.call(seed=0)) for case in CASES["attention"]}
    ran = [label for label, found in figures.items() if not found.refused]
    print(f"checked on {len(ran)} cases, refused {len(figures) - len(ran)}: {', '.join(ran)}")


if __name__ == "__main__":
    main()
