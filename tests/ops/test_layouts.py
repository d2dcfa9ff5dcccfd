"""Tensors that no kernel reads as they are: other layouts, meta, a pending sign. And masks of fewer
dims, and lengths that lie."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attnops
from attnops.core.errors import InvalidInput, find
from attnops.core.kernel import kernels_of
from tests.adapters.helpers import Calls
from tests.ops.calls import FUNCTIONS, good, i, written


class Tagged(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantised": lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor(list(t.unbind())),
    "jagged": lambda t: torch.nested.nested_tensor(list(t.unbind()), layout=torch.jagged),
    "a class": lambda t: t.as_subclass(Tagged),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_another_layout_is_refused_before_anything_is_written(name, kind):
    tried = 0
    FUNCTIONS[name](
        **good(name)
    )  # what is remembered of it must not be compared with tensors that have no sizes
    for field, value in good(name).items():
        if not isinstance(value, Tensor):
            continue
        arguments = good(name)
        try:
            arguments[field] = MADE[kind](value)
        except (RuntimeError, ValueError, IndexError):
            continue  # torch has no such tensor of this shape and dtype
        tried += 1
        before = written(name, arguments)
        for _ in range(2):
            with pytest.raises(InvalidInput) as caught:
                FUNCTIONS[name](**arguments)
            own = "a plain tensor, as x.as_subclass" if kind == "a class" else "strided"
            assert own in caught.value.want or ".dtype" in caught.value.field, field
        assert written(name, arguments) == before
    assert tried or kind in ("csr", "mkldnn", "quantised", "jagged")


@torch.no_grad()
@pytest.mark.parametrize("name", ["attention", "paged_attention", "write_kv"])
def test_meta_tensors_reach_no_kernel(name):
    arguments = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in good(name).items()}
    for _ in range(3):  # the second goes another way than the first
        out = FUNCTIONS[name](**arguments)
    assert out is None or out.device.type == "meta"


@torch.no_grad()
def test_a_pending_sign_is_resolved():
    torch.manual_seed(0)
    pair = torch.randn(1, 3, 2, 8, dtype=torch.complex64)
    q, k = pair.conj().imag, torch.randn(1, 3, 2, 8)
    assert q.is_neg()
    want = attnops.attention(q.resolve_neg(), k, k)
    for _ in range(3):
        torch.testing.assert_close(attnops.attention(q, k, k), want)


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (4, 1, 7)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("grad", [False, True], ids=["direct", "autograd"])
def test_masks_of_fewer_dims_mean_what_they_mean_in_sdpa(shape, kind, grad):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)
    mask = torch.randn(shape) if kind == "additive" else torch.rand(shape) < 0.7
    if kind == "bool":
        mask[..., 0] = True
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    ).transpose(1, 2)
    with torch.set_grad_enabled(grad):
        for kernel in (None, None, "reference"):
            torch.testing.assert_close(attnops.attention(q, k, v, mask=mask, kernel=kernel), want)
    compiled = torch.compile(
        lambda *a: attnops.attention(*a[:3], mask=a[3]), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q, k, v, mask), want)


# Causal biases of torch ---------------------------------------------------------------------------


def bias_attention(q, k, v, mask, kv_end=None):
    return attnops.attention(q, k, v, mask=mask, kv_end=kv_end)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 7), (7, 5)])
@pytest.mark.parametrize("how", ["eager", "compiled", "with gradients", "kv_end"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_a_causal_bias_means_what_it_means_to_torch(make, queries, keys, how):
    torch.manual_seed(0)
    q, k = (torch.randn(2, n, 4, 8, requires_grad=how == "with gradients") for n in (queries, keys))
    end = torch.tensor([keys - 2, keys]) if how == "kv_end" else None
    bias = make(queries, keys)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(
        keys - queries if make is causal_lower_right else 0
    )
    call = (
        torch.compile(bias_attention, fullgraph=True, backend="aot_eager")
        if how == "compiled"
        else bias_attention
    )
    got, want = call(q, k, k, bias, end), bias_attention(q, k, k, seen, end)
    torch.testing.assert_close(got, want)
    if how == "with gradients":
        for ours, other in zip(
            *(torch.autograd.grad(x.square().sum(), (q, k)) for x in (got, want)), strict=True
        ):
            torch.testing.assert_close(ours, other)
    with torch.no_grad(), Calls() as calls:
        bias_attention(q, k, k, bias, end)
    assert calls.names == ["attnops::attention"]


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_a_compiled_call_does_not_ask_a_class_what_the_op_shall_do():
    q, tagged = torch.randn(2, 5, 4, 8), torch.zeros(5, 5).as_subclass(Tagged)
    with pytest.raises(Exception, match="a Tagged") as caught:
        torch.compile(bias_attention, fullgraph=True, backend="aot_eager")(q, q, q, tagged)
    assert isinstance(find(caught.value), InvalidInput)


# Lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["direct", "autograd"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("varlen_attention", {"max_seqlen_q": 1}),
        ("varlen_attention", {"max_seqlen_k": 2}),
        ("paged_attention", {"max_seqlen_q": 1}),
        ("mla_attention", {"max_seqlen_q": 1}),
        ("vertical_slash_attention", {"max_seqlen_k": 2}),
    ],
)
def test_a_longest_request_that_is_longer_is_seen_on_the_host(name, change, grad):
    with torch.set_grad_enabled(grad):
        for kernel in [None, *kernels_of(name)]:
            arguments = good(name) | {"kernel": kernel}
            try:
                FUNCTIONS[name](**arguments)
            except attnops.AttnopsError:
                continue  # this kernel does not take the call
            right = FUNCTIONS[name](**arguments)
            arguments |= change
            before = arguments["output"].clone() if "output" in arguments else None
            try:
                found = FUNCTIONS[name](**arguments)
            except InvalidInput as error:
                assert error.field == "max_seqlen" and "longest request" in error.want
                assert before is None or torch.equal(before, arguments["output"])
            else:
                torch.testing.assert_close(found, right, msg=f"{kernel} gives wrong rows")


def test_it_is_seen_in_a_call_like_one_before():
    arguments = good("paged_attention") | {"cu_seqlens_q": i(0, 1, 3)}
    with torch.no_grad():
        for _ in range(3):
            attnops.paged_attention(**arguments)
        with pytest.raises(InvalidInput, match=r"max_seqlen: got 2, want >= 3"):
            attnops.paged_attention(**(arguments | {"cu_seqlens_q": i(0, 0, 3)}))
