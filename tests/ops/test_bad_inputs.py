"""Calls that break a contract.

The error is typed, names the field, what was given and what is allowed, and nothing was written.
`breaks` derives such calls from an op's record. What a record says is compared with docs/ops.md by
tests/test_docs.py. `BAD` lists calls that follow from no record.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from attnops.core.arguments import REQUIRED, Arg
from attnops.core.checks import name as dtype_name
from attnops.core.errors import (
    AttnopsError,
    InvalidInput,
    NoGradient,
    NoKernel,
    UnknownKernel,
    find,
)
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.ops import OPS
from attnops.ops.case_data import BF16, E4M3, E5M2, F16, F32, F64, I32, I64, INT8, U8
from tests.ops.calls import (
    FUNCTIONS,
    LATENTS,
    PARAMETERS,
    SPEC,
    good,
    i,
    record_call,
    sizes_of,
    tensor,
    written,
)

NAN, INF = float("nan"), float("inf")


def f(*shape, dtype=F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


class Bad(NamedTuple):
    function: str
    change: Mapping[str, Any]
    field: str
    got: str
    want: str
    error: type[AttnopsError] = InvalidInput


def in_order(op: str, public: bool, **changed: int) -> dict[str, Any]:
    """Arguments of the public function, or else of the op."""
    return (good if public else record_call)(op, **changed)


def refuses(bad: Bad, public: bool = True, others: Mapping[str, Any] | None = None) -> None:
    """The public function, or else the op, refuses the call. others: arguments in order."""
    call = FUNCTIONS[bad.function] if public else getattr(torch.ops.attnops, bad.function)
    arguments = {**(others or in_order(bad.function, public)), **bad.change}
    before = written(bad.function, arguments)
    with pytest.raises(bad.error) as caught:
        call(**arguments)
    error: Any = caught.value
    assert bad.got in str(error)
    assert bad.want in str(error)
    if bad.error is InvalidInput:
        assert error.field == bad.field
        assert str(error) == f"{bad.field}: got {error.got}, want {error.want}"
        assert bad.got in str(error.got)
        assert bad.want in error.want
    assert written(bad.function, arguments) == before, "the op wrote before it refused the call"


# What records say ---------------------------------------------------------------------------------

DTYPES = (torch.bool, U8, INT8, I32, I64, E4M3, E5M2, F16, BF16, F32, F64, torch.complex64)
ANY_DIMS = ("x", "gate", "residual", "output")
OWN_DIMS = {("attention", "mask"), *product(("linear", "rms_norm"), ANY_DIMS)}
OWN_DIMS |= {("experts", "gate_up"), ("mxfp4_experts", "gate_up"), ("mxfp4_experts", "down")}
"""Tensors of which public functions take other numbers of dims, or name the dims in other words."""

WRONG_TYPE: dict[str, Any] = {"int": 1.5, "float": "1", "bool": "yes", "str": 3}


def is_public(op: str, argument: str) -> bool:
    return op in FUNCTIONS and argument in PARAMETERS[op]


def breaks(op: str, a: Arg) -> Iterator[Bad]:
    """Calls in which one argument is not what the record says of it."""
    if not a.tensor:
        yield from of_number(op, a)
        return
    call = record_call(op)
    if is_public(op, a.name):  # which makes tensors itself
        made = {b.name for b in OPS[op].spec.args if b.written and not is_public(op, b.name)}
        call = {n: x for n, x in call.items() if n not in made}
    value = call.get(a.name)
    value = tensor(a, sizes_of(op), call) if value is None else value
    if is_public(op, a.name):
        yield Bad(op, {a.name: "x"}, a.name, "str", "a tensor")
        if a.kind == "Tensor" and PARAMETERS[op][a.name].default is REQUIRED:
            yield Bad(op, {a.name: None}, a.name, "None", "a tensor")
    of_layout = of_dims(op, a, value), of_dtype(a, value, call), of_sizes(op, a, value, call)
    for wrong, *text in chain(*of_layout):
        yield Bad(op, {a.name: wrong}, *text)
    yield from of_device(op, a, value, call)
    if a.written:
        still = torch.zeros((), dtype=value.dtype).expand(value.shape)
        yield Bad(op, {a.name: still}, f"{a.name}.stride()", str(still.stride()), "no stride of 0")
    if value.dtype.is_floating_point and OPS[op].autograd is None and not OPS[op].once:
        wrong, got = value.clone().requires_grad_(), f"requires_grad=True on {a.name}"
        yield Bad(op, {a.name: wrong}, a.name, got, "no gradient", NoGradient)


def of_number(op: str, a: Arg) -> Iterator[Bad]:
    def wrong(value: Any, got: str, want: str) -> Bad:
        return Bad(op, {a.name: value}, a.name, got, want)

    if is_public(op, a.name):
        yield wrong(WRONG_TYPE[a.kind], repr(WRONG_TYPE[a.kind]), f"a value of type {a.kind}")
    # A window or a chunk of so many keys is none.
    if a.kind == "int" and is_public(op, a.name) and a.most is None:
        yield wrong(2**63, "an int of 64 bits", "that fits into 64 bits")
    for value in (NAN, INF, -INF) * (a.kind == "float"):
        yield wrong(value, str(value), "a finite number")
    if a.least is not None:
        yield wrong(type(a.least)(a.least - 1), str(a.least - 1), f">= {a.least:g}")
    if a.most is not None and a.kind == "float":
        yield wrong(a.most * 10, str(a.most * 10), f"<= {a.most}")
    if a.choices:
        yield wrong("nope", "'nope'", " | ".join(choice or '""' for choice in a.choices))


Wrong = tuple[Tensor, str, str, str]


def of_dims(op: str, a: Arg, value: Tensor) -> Iterator[Wrong]:
    fewer = value.flatten()[:1].reshape(())
    wrong = [fewer] if a.layout[-1].text == "..." else [fewer, value[None]]
    for given in wrong * ((op, a.name) not in OWN_DIMS):
        yield given, a.name, f"shape {tuple(given.shape)}", f"[{a.dims}]"


def of_dtype(a: Arg, value: Tensor, call: Mapping[str, Any]) -> Iterator[Wrong]:
    if isinstance(a.dtypes, str):
        allowed: Any = (call[a.dtypes].dtype,)
        want = f"{dtype_name(allowed[0])}, as {a.dtypes}"
    else:
        allowed = (value.dtype,) if callable(a.dtypes) else a.dtypes
        want = " | ".join(map(dtype_name, allowed))
    for dtype in DTYPES:
        if dtype not in allowed:
            yield value.to(dtype), f"{a.name}.dtype", dtype_name(dtype), want


def place(a: Arg, dim: int) -> str:
    return f"{a.name}.shape[{dim}]"


def of_sizes(op: str, a: Arg, value: Tensor, call: Mapping[str, Any]) -> Iterator[Wrong]:
    """One dim is longer by one, or shorter where the record has a bound."""
    given = [b for b in OPS[op].spec.args if b is a or isinstance(call.get(b.name), Tensor)]
    places = [(place(b, dim), size.text) for b in given for dim, size in enumerate(b.layout)]
    for dim, size in enumerate(a.layout):
        if size.text == "...":
            continue
        was, own = value.shape[dim], place(a, dim)
        now = was - 1 if size.least else was + 1
        wrong = value.new_zeros((*value.shape[:dim], now, *value.shape[dim + 1 :]))
        if size.options:
            yield wrong, own, str(now), f">= {was}" if size.least else str(was)
            continue
        first, *others = [place for place, text in places if text == size.text]
        if own != first:
            yield wrong, own, str(now), f"{was} ({size.text}, as {first})"
        elif others:
            yield wrong, others[0], str(was), f"{now} ({size.text}, as {own})"


def of_device(op: str, a: Arg, value: Tensor, call: Mapping[str, Any]) -> Iterator[Bad]:
    """The first tensor's device is the one that others must have."""
    if a.any_device:
        return
    tensors = [b for b in OPS[op].spec.args if isinstance(call.get(b.name), Tensor)]
    first, *others = [b for b in tensors if not b.any_device]
    if a is not first:
        yield Bad(op, {a.name: value.to("meta")}, f"{a.name}.device", "meta", "cpu")
    elif others:
        yield Bad(op, {a.name: value.to("meta")}, f"{others[0].name}.device", "cpu", "meta")


@pytest.mark.parametrize(
    ("op", "argument"),
    [(op, a.name) for op in OPS for a in OPS[op].spec.args if a.name != "policy"],
)
def test_what_breaks_the_record_is_refused(op, argument):
    public = is_public(op, argument)
    others = in_order(op, public)
    for bad in breaks(op, OPS[op].spec[argument]):
        refuses(bad, public, others)


ATTENTION = "Hkv D Dv"
LATENTS_LEAST = "page Dc Dr"
LEAST = {
    "decode_attention": "page Hkv D",
    "rotate_and_write_kv": "page Hkv D Dv",
    "attention": ATTENTION,
    "attention_backward": ATTENTION,
    "experts": "E In Inner Out K",
    "linear": "In Out",
    "merge_states": "N",
    "lookup_drafts": "L",
    "accept": "N",
    "advance_rows": "N",
    "next_inputs": "L N",
    "accept_sampled": "N V",
    "build_tree": "M",
    "tree_mask": "N",
    "token_rows": "starts",
    "write_latent": LATENTS_LEAST,
    "mla_attention": f"{LATENTS_LEAST} H",
    "rope_quantize_latent": "H Dc Dr",
    "mxfp4_experts": "E In Half Out K",
    "paged_attention": f"page {ATTENTION}",
    "write_kv": "page",
    "copy_kv": "page",
    "rms_norm": "In",
    "gated_delta_rule": "Hk Hv Dk Dv",
    "gated_delta_rule_backward": "Hk Hv Dk Dv",
    "mamba2_scan": "Hk Hv Dk Dv",
    "mamba2_scan_backward": "Hk Hv Dk Dv",
    "causal_conv1d": "C W",
    "causal_conv1d_backward": "C W",
    "route": "E K",
    "sparse_mla_attention": f"{LATENTS_LEAST} H",
    "write_latent_packed": LATENTS_LEAST,
    "varlen_attention": f"starts {ATTENTION}",
    "varlen_attention_backward": f"starts {ATTENTION}",
    "vertical_slash_indexes": "V S",
    "vertical_slash_attention": "Hkv",
}
"""The sizes of which the record wants some."""


def test_what_the_docs_do_not_show_of_a_record():
    assert {op: " ".join(OPS[op].spec.least) for op in OPS if OPS[op].spec.least} == LEAST
    assert {a.name for op in OPS for a in OPS[op].spec.args if a.any_device} == {
        "plan",
        "seq_lens_cpu",
        "cu_seqlens_q_cpu",
    }


@pytest.mark.parametrize(
    ("op", "letter"), [(op, letter) for op in LEAST for letter in LEAST[op].split()]
)
def test_a_size_below_the_least_is_refused(op, letter):
    bound = OPS[op].spec.least[letter]
    few = int(bound.split()[1]) - 1
    a = next(a for a in OPS[op].spec.args if letter in [size.text for size in a.layout])
    dim = [size.text for size in a.layout].index(letter)
    # Of no experts the public functions say that none has the number that a token is given.
    public = is_public(op, a.name) and letter != "E"
    call = in_order(op, public, **{letter: few})
    refuses(Bad(op, call, place(a, dim), str(few), bound), public)


@pytest.mark.parametrize("op", [op for op in FUNCTIONS if is_public(op, "kernel")])
def test_a_kernel_that_is_none_is_refused(op):
    want = f"op {op.removeprefix('plan_')}"
    refuses(said(op, {"kernel": "nope"}, f"kernel: got 'nope', want {want}", UnknownKernel))


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        (op, k.name)
        for op in FUNCTIONS
        if is_public(op, "kernel")
        for k in kernels_of(op).values()
        if k.absences(Target())
    ],
)
def test_a_kernel_of_another_machine_is_refused(op, kernel):
    refuses(
        Bad(
            op,
            {"kernel": kernel},
            "kernel",
            f"not {kernel}:",
            f"{kernel!r} was asked for",
            NoKernel,
        )
    )


# What no record says ------------------------------------------------------------------------------

PACKED = f(4, 2, 136, dtype=U8)
KEPT = {"kept_x": f(2, 1, 4), "accepted": torch.zeros(2, 2, dtype=torch.int32)}
FOUR_BITS = {"gate_up": f(4, 128, 16, dtype=U8), "gate_up_scales": f(4, 128, 1, dtype=U8)}

UNRECORDED: dict[str, list[tuple[Any, ...]]] = {
    "attention": [
        (
            {"query": f(2, 3, 4, 8, dtype=BF16)},
            "key.dtype: got float32, want bfloat16 (the query's)",
        ),
        (
            {"key": f(2, 5, 3, 8), "value": f(2, 5, 3, 6)},
            "query.shape[2]: got 4, want a multiple of the key's 3",
        ),
        (
            {"query": f(2, 3, 4, 0), "key": f(2, 5, 2, 0), "scale": 1.0},
            "query.shape[3]: got 0, want >= 1",
        ),
        (
            {"query": f(2, 3, 4, 8).to(E4M3)},
            "q_scale: got None, want a scale, because the query is float8",
        ),
        ({"q_scale": f(1)}, "q_scale: got a tensor, want None, because the query is float32"),
        ({"window": 4}, "window: got 4, want (left, right)"),
        ({"window": (1.5, 0)}, "window_left: got 1.5, want a value of type int"),
        (
            {"window": (-(2**63) - 1, 0)},
            "window_left: got 64 bits, want >= -1 that fits into 64 bits",
        ),
        ({"scale": 10**400}, "scale: got 1329 bits, want fits into 64 bits"),
        ({"mask": f(5)}, "mask: got (5,), want [1 | B, 1 | Hq, 1 | S, K]"),
        ({"mask": f(4, 5)}, "mask.shape[2]: got 4, want 1 or 3"),
        (
            {"mask": f(2, 5)},
            "mask: got shape (2, 5), want of a mask [B, K] give mask[:, None, None]",
        ),
        ({"mask": max}, "mask: got builtin, want torch.nn.attention.flex_attention"),
        (
            {"mask": causal_lower_right(4, 5)},
            "mask: got a CausalBias of 4 queries and 5 keys, want 3 queries and 5 keys",
        ),
        ({"kernel": "scatter"}, "kernel: got 'scatter', want reference", UnknownKernel),
        (
            {"kernel": "sdpa", "softcap": 1.0, "sinks": f(4)},
            "softcap: got softcap=True, want sinks=True",
            NoKernel,
        ),
    ],
    "paged_attention": [
        ({"query": f(3, 4, 8).to(E4M3)}, "output.dtype: got float32, want bfloat16"),
    ],
    "write_kv": [
        (
            {"key": f(3, 2, 8, dtype=BF16), "value": f(3, 2, 6, dtype=BF16)},
            "k_pages.dtype: got float32, want bfloat16",
        ),
    ],
    "decode_attention": [
        (
            {"query": f(2, 3, 8), "output": f(2, 3, 8)},
            "query.shape[1]: got 3, want a multiple of the key's 2",
        ),
        ({"sin": None}, "cos, sin: got one of them, want both, or neither"),
        ({"cos": None}, "cos: got None, want a tensor, because sin is one"),
        ({"cos": f(2, 8)}, "sin.shape[1]: got 4, want 8, as cos.shape[1]"),
        ({"workspace": f(8, dtype=U8)[::2]}, "workspace.stride(): got (2,), want (1,)"),
    ],
    "varlen_attention": [
        ({"mask": causal_lower_right(3, 5)}, "mask: got a CausalBias, want a plain tensor"),
        (
            {"kernel": "sdpa", "return_lse": True},
            "lse: got lse=True, want 'sdpa' was asked for",
            NoKernel,
        ),
    ],
    "decode_rows": [
        ({"float8": True}, "float8: got True, want False without q_heads"),
    ],
    "vertical_slash_indexes": [
        (
            {"slash_counts": i(1, 1, 1, 1)},
            "vertical_counts, slash_counts: got one of them, want both or neither",
        ),
    ],
    "vertical_slash_attention": [
        ({"indexes": 3}, "indexes: got int, want the four tensors"),
        ({"max_seqlen_q": 65}, "block_count.shape[2]: got 1, want 2 ((max_seqlen_q + 63) // 64)"),
        ({"kernel": "sgl_sparse"}, "head_dim: got head_dim=8, want (wants 128)", NoKernel),
    ],
    "copy_kv": [
        ({"v_pages": f(2, 4, 2, 8)}, "v_pages: got (2, 4, 2, 8), want as the keys"),
    ],
    "plan_paged_attention": [
        ({"spec": replace(SPEC, q_heads=3)}, "q_heads: got 3, want a multiple of kv_heads = 2"),
    ],
    "plan_mla_attention": [
        ({"spec": replace(LATENTS, head_dim=512)}, "head_dim: got 512, want > v_head_dim = 512"),
    ],
    "mla_attention": [
        ({"mask": "causal"}, "mask: got str, want a tensor, bool or additive"),
        (
            {"latent_pages": f(4, 2, 8, dtype=BF16)},
            "latent_pages.dtype: got bfloat16, want float32 | float8",
        ),
    ],
    "write_latent": [
        (
            {"latent_pages": f(4, 2, 8).to(E4M3)},
            "kv_scale: got None, want because the latents are float8",
        ),
        (
            {"latent": f(3, 6).to(E4M3), "k_pe": f(3, 2).to(E4M3)},
            "latent_pages.dtype: got float32, want float8_e4m3fn, as the latents",
        ),
        (
            {
                "latent": f(3, 6).to(INT8),
                "k_pe": f(3, 2).to(INT8),
                "kv_scale": f(1),
                "latent_pages": f(4, 2, 8).to(INT8),
            },
            "kv_scale: got a tensor, want None, because the latents are int8 already",
        ),
    ],
    "rope_quantize_latent": [
        (
            {"q_pe": f(3, 4, 3), "k_pe": f(3, 3), "cos_sin": f(9, 3)},
            "q_pe.shape[2]: got 3, want even",
        ),
        ({"q_scale": 0.0}, "q_scale: got 0.0, want a finite number > 0"),
    ],
    "sparse_mla_attention": [
        (
            {"latent_pages": PACKED[..., :130]},
            "latent_pages.shape[2]: got 130, want 136 (bytes of a packed latent)",
        ),
        (
            {"latent_pages": f(4, 2, 130, dtype=BF16)},
            "latent_pages.dtype: got bfloat16, want float32 | float8_e4m3fn",
        ),
        (
            {"latent_pages": PACKED, "kv_scale": f(1)},
            "kv_scale: got a tensor, want None, because packed pages hold their own",
        ),
        (
            {"latent_pages": PACKED, "q_nope": f(3, 4, 16), "output": f(3, 4, 16)},
            "q_nope.shape[2]: got 16, want a multiple of 128",
        ),
    ],
    "write_latent_packed": [
        (
            {"latent": f(3, 100)},
            "latent.shape[1]: got 100, want a multiple of 128 (pages are packed)",
        ),
    ],
    "experts": [
        ({"gate_up": f(10, 8)}, "gate_up: got (10, 8), want [E, 2 Inner, In]"),
        (
            {"top_k_index": f(3, 5, dtype=I32), "top_k_weights": f(3, 5)},
            "top_k_index.shape[1]: got 5, want <= 4",
        ),
        (
            {"top_k_index": torch.tensor([[0, 4]] * 3)},
            "top_k_index: got 4, want 0 to 3, the experts of gate_up",
        ),
        (
            {"top_k_index": torch.tensor([[0, 1], [-1, 2], [0, 1]])},
            "top_k_index: got -1, want 0 to 3, the experts of gate_up",
        ),
        (
            {"activation": "gelu", "alpha": 1.7},
            "alpha: got 1.7, want 1, because activation is not 'silu'",
        ),
    ],
    "mxfp4_experts": [
        (
            {"down": f(4, 16, 16, 2, dtype=U8)},
            "down: got (4, 16, 16, 2), want [E, Out, Inner // 2]",
        ),
        (
            {
                "down": f(4, 20, 32, dtype=U8),
                "down_scales": f(4, 20, 2, dtype=U8),
                "down_bias": f(4, 20),
                "output": f(3, 20),
            },
            "down.shape[1]: got 20, want a multiple of 16",
        ),
        ({"x": f(3, 32), **FOUR_BITS}, "x.shape[1]: got 32, want a multiple of 64"),
    ],
    "route": [
        ({"logits": f(3, 0), "bias": f(0)}, "top_k: got 2, want 1 to 0"),
        ({"top_k": 9}, "top_k: got 9, want 1 to 8 (E, as logits.shape[1])"),
        ({"top_k": 2.0}, "top_k: got 2.0, want a value of type int"),
        ({"top_k": 5}, "index.shape[1]: got 5, want <= 4, the experts of top_groups groups"),
        ({"groups": 3}, "groups: got 3, want a divisor of 8 (E, as logits.shape[1])"),
        ({"groups": 1}, "top_groups: got 2, want 1, because groups is 1"),
        ({"top_groups": 5}, "top_groups: got 5, want <= 4 (groups)"),
        ({"group_best": 3}, "group_best: got 3, want <= 2, the experts of a group"),
        ({"eps": 1e-20}, "eps: got 1e-20, want 0, because normalize is False"),
        ({"dtype": I32}, "dtype: got int32, want float16"),
    ],
    "rms_norm": [
        ({"x": torch.tensor(1.0)}, "x: got shape (), want [..., In]"),
        ({"eps": 0.0}, "eps: got 0.0, want > 0"),
        ({"weight": f(7)}, "weight.shape[0]: got 7, want 8 (In, as x.shape[1])"),
        (
            {"x": f(3, 2, 8), "output": None, "residual": f(6, 8)},
            "residual: got shape (6, 8), want 3 dims, as x",
        ),
        (
            {"x": f(3, 2, 8), "output": f(2, 3, 8).transpose(0, 1), "residual": None},
            "output.stride(): got (8, 24, 1), want one dim in memory",
        ),
    ],
    "gated_delta_rule": [
        ({"query": f(3, 16)}, "query: got shape (3, 16), want [T, Hk, Dk]"),
        (
            {"value": f(3, 3, 6), "decay": f(3, 3), "beta": f(3, 3), "state": f(2, 3, 8, 6)}
            | {"output": f(3, 3, 6)},
            "value.shape[1]: got 3, want a multiple of 2 (Hk, as query.shape[1])",
        ),
        ({"kept_beta": f(2, 4, 4)}, "kept_beta: got a tensor, want None, because accepted is None"),
        (
            {"accepted": torch.zeros(2, 2, dtype=torch.int32)},
            "kept_key: got None, want a tensor, because accepted is one",
        ),
    ],
    "mamba2_scan": [
        ({"x": f(3, 24)}, "x: got shape (3, 24), want [T, Hv, Dv]"),
        ({"dt_min": -1.0}, "dt_min: got -1.0, want >= 0"),
        ({"dt_max": float("inf")}, "dt_max: got inf, want a finite number >= 0"),
    ],
    "causal_conv1d": [
        ({"x": f(12)}, "x: got shape (12,), want [T, C]"),
        ({"state": f(2, 4, 1)}, "state.shape[2]: got 1, want >= 2 (W - 1)"),
        (KEPT, "max_seqlen_q: got 2, want at most 1 (R, as kept_x.shape[1])"),
        (
            KEPT | {"max_seqlen_q": 1, "fresh": True},
            "fresh: got True, want False, because accepted tokens come before these",
        ),
    ],
    "linear": [
        ({"x": torch.tensor(1.0)}, "x: got shape (), want [..., In]"),
        ({"weight": f(7, 8)}, "weight.shape[0]: got 7, want a multiple of 2: rows of the gate"),
        ({"norm_eps": 0.0}, "norm_eps: got 0.0, want > 0, because norm_weight is given"),
        ({"norm_weight": None}, "norm_eps: got 1e-05, want 0, because norm_weight is None"),
        (
            {"x": f(3, 2, 8), "output": None, "residual": f(6, 3)},
            "residual: got shape (6, 3), want 3 dims, as x",
        ),
        (
            {"x": f(3, 2, 8), "output": None, "residual": f(2, 3, 3)},
            "residual.shape[0]: got 2, want 3, as x",
        ),
        (
            {"x": f(3, 2, 8), "output": f(2, 3, 3).transpose(0, 1)},
            "output.stride(): got (3, 9, 1), want one dim in memory",
        ),
    ],
}
"""By function: what is changed, and parts of the error's text: its field, what was given, what is
allowed."""


def said(
    function: str, change: Mapping[str, Any], text: str, error: type[AttnopsError] = InvalidInput
) -> Bad:
    field, rest = text.split(": got ", 1)
    got, want = rest.split(", want ", 1)
    return Bad(function, change, field, got, want, error)


BAD = [said(function, *row) for function, rows in UNRECORDED.items() for row in rows]


def name(bad: Bad) -> str:
    return f"{bad.function}-{bad.field}-{bad.got}".replace("[", "").replace("]", "")


@pytest.mark.parametrize("bad", BAD, ids=name)
def test_bad_input(bad):
    refuses(bad)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_the_good_call_is_good(op):
    FUNCTIONS[op](**good(op))


# How the error comes ------------------------------------------------------------------------------


def broken(
    op: str, argument: str, field: str = "", error: type[AttnopsError] = InvalidInput
) -> Bad:
    """The first call with a wrong tensor or float and this error. field: that of the error."""
    found = [b for b in breaks(op, OPS[op].spec[argument]) if b.error is error]
    tensors = [b for b in found if isinstance(b.change[argument], (Tensor, float))]
    return next(b for b in tensors if field in ("", b.field))


def first(op: str) -> str:
    """The first tensor of the op."""
    return next(n for n, x in record_call(op).items() if isinstance(x, Tensor))


def floats(op: str) -> list[str]:
    """The tensors of floats of an op that has no gradient."""
    found = {n: x for n, x in record_call(op).items() if isinstance(x, Tensor)}
    return [n for n, x in found.items() if x.is_floating_point() and OPS[op].autograd is None]


# A compiler runs the same check on fake tensors, or traces it. The user must still read the text
# and find the error. One call of each kind. The functions that plan are never compiled.
TRACED = [op for op in FUNCTIONS if not op.startswith("plan_")]
FIELDS = ("window", "indexes", "q_scale", "softcap", "k_scale, v_scale")
COMPILED = [
    *[broken(op, first(op)) for op in TRACED],
    *[broken(op, name, error=NoGradient) for op in TRACED for name in floats(op)[:1]],
    *[broken(op, "softcap") for op in ("attention", "varlen_attention", "decode_attention")],
    *[broken(f"{kind}_attention", "mask", "mask.shape[1]") for kind in ("varlen", "paged", "mla")],
    broken("attention", "key", "key.shape[3]"),
    *[b for b in BAD if b.function in TRACED and b.field in FIELDS],
    *[b for b in BAD if b.function in TRACED and b.error is not InvalidInput],
]

# After a graph break the call is an eager one, whatever is wrong with it. One of each error, of an
# op that returns and of one that writes.
BROKEN = [
    broken("attention", "query"),
    *[b for b in BAD if b.function == "attention" and b.error is not InvalidInput][:2],
    broken("write_kv", "key"),
    said("write_kv", {"kernel": "nope"}, "kernel: got 'nope', want op write_kv", UnknownKernel),
    broken("write_kv", "key", error=NoGradient),
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("bad", "fullgraph"),
    [
        pytest.param(b, whole, id=f"{name(b)}-{how}")
        for bads, whole, how in ((COMPILED, True, "whole"), (BROKEN, False, "broken"))
        for b in bads
    ],
)
def test_message_and_error_survive_compilation(bad, fullgraph):
    arguments = good(bad.function) | bad.change
    before, public = written(bad.function, arguments), FUNCTIONS[bad.function]
    with pytest.raises(Exception) as caught:  # Dynamo wraps it in an error of its own
        torch.compile(lambda: public(**arguments), backend="eager", fullgraph=fullgraph)()
    text = str(caught.value)
    assert type(find(caught.value)) is bad.error
    assert bad.got in text
    assert bad.want in text
    assert written(bad.function, arguments) == before


# What the dispatcher would refuse without naming the field, or what the public functions would trip
# over before the op's check.
MALFORMED = [
    said("attention", {"value": [1.0]}, "value: got list, want a tensor [B, K, Hkv, Dv]"),
    said("paged_attention", {"v_pages": None, "output": None}, "v_pages: got None, want a tensor"),
    said("decode_attention", {"query": None, "output": None}, "query: got None, want a tensor"),
]


@pytest.mark.parametrize("bad", MALFORMED, ids=name)
def test_what_no_dispatcher_takes_is_named(bad):
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            refuses(bad)


def test_errors_are_ordinary_python_errors_too():
    assert issubclass(InvalidInput, ValueError) and issubclass(NoGradient, RuntimeError)
