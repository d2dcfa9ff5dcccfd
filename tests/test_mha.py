"""MultiheadAttention against torch.nn.MultiheadAttention: results, gradients and state_dict,
argument by argument."""

import copy
import inspect
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from attnops.core.errors import UnknownKernel
from attnops.nn import MultiheadAttention
from tests.modules import close, refused

E, H, L, S, N = 12, 4, 5, 7, 2


@pytest.fixture(autouse=True)
def _double():
    """In float64 a tolerance can be narrow enough to tell rounding from a mistake."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pair(**kwargs):
    theirs = nn.MultiheadAttention(E, H, **kwargs)
    with torch.no_grad():
        for p in theirs.parameters():  # biases start at 0, which hides mistakes
            p.normal_(std=0.5)
    ours = MultiheadAttention(E, H, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def qkv(batch_first=False, batched=True, kdim=E, vdim=E, same=False, queries=L, keys=S):
    def one(length, width):
        shape = (
            (length, width)
            if not batched
            else (N, length, width)
            if batch_first
            else (length, N, width)
        )
        return torch.randn(shape)

    if same:
        x = one(queries, E)
        return x, x, x
    return one(queries, E), one(keys, kdim), one(keys, vdim)


def padding(kind, batched, keys=S):
    hide = torch.zeros((N, keys), dtype=torch.bool)
    hide[0, -2:] = True
    hide[1, :1] = True
    hide = hide if batched else hide[0]
    return {"none": None, "bool": hide, "float": torch.randn(hide.shape)}[kind]


def masking(kind, batched, keys=S, queries=L):
    if kind == "none":
        return None
    dims, dtype = kind
    shape = (queries, keys) if dims == 2 else ((N if batched else 1) * H, queries, keys)
    if dtype == "float":
        return torch.randn(shape)
    hide = torch.rand(shape) < 0.4
    hide[..., 2] = False  # every query sees a key: torch gives NaN where one does not
    return hide


def agree(theirs, ours, args, grads=True, **kwargs):
    """Both give the same result and the same gradients, of inputs, float masks and parameters."""

    def run(module):
        module.zero_grad()
        seen = {}

        def leaf(x):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            return seen.setdefault(id(x), x.clone().requires_grad_(grads))

        leaves = [leaf(x) for x in args]
        given = {name: leaf(x) for name, x in kwargs.items()}
        torch.manual_seed(1)
        out, weights = module(*leaves, **given)
        if grads:
            loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
            if weights is not None:
                loss = loss + (weights**2).sum()
            loss.backward()
        return [
            out,
            weights,
            *(x.grad for x in seen.values()),
            *(p.grad for _, p in sorted(module.named_parameters())),
        ]

    for want, got in zip(run(theirs), run(ours), strict=True):
        close(got, want, 2e-6)
        assert got is None or got.dtype == want.dtype


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "attn", ["none", (2, "bool"), (2, "float"), (3, "bool"), (3, "float")], ids=str
)
@pytest.mark.parametrize("pad", ["none", "bool", "float"])
@pytest.mark.parametrize("form", ["seq_first", "batch_first", "unbatched"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks(form, pad, attn, need_weights):
    batched = form != "unbatched"
    theirs, ours = pair(batch_first=form == "batch_first")
    args = qkv(form == "batch_first", batched)
    masks = {"key_padding_mask": padding(pad, batched), "attn_mask": masking(attn, batched)}
    agree(
        theirs,
        ours,
        args,
        **masks,
        need_weights=need_weights,
        average_attn_weights=form == "seq_first",
    )


BUILDS = [
    dict(zip(("bias", "add_bias_kv", "add_zero_attn"), flags, strict=True), **dims)
    for flags in itertools.product((True, False), (False, True), (False, True))
    for dims in ({}, {"kdim": 6, "vdim": 10}, {"kdim": 6}, {"vdim": 10})
]


@pytest.mark.parametrize(
    "masks", [("none", "none"), ("bool", (3, "bool")), ("float", (2, "float"))], ids=str
)
@pytest.mark.parametrize("build", BUILDS, ids=lambda b: ",".join(f"{k}={v}" for k, v in b.items()))
def test_constructor_arguments(build, masks):
    theirs, ours = pair(**build)
    # One tensor as query, key and value takes a way of its own.
    same = E == build.get("kdim", E) == build.get("vdim", E)
    args = qkv(
        kdim=build.get("kdim", E), vdim=build.get("vdim", E), same=same, queries=S if same else L
    )
    given = {
        "key_padding_mask": padding(masks[0], True),
        "attn_mask": masking(masks[1], True, queries=len(args[0])),
    }
    for need_weights in (False, True):
        agree(theirs, ours, args, **given, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("pad", ["none", "float"])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_causal_hint(extra, pad, need_weights):
    theirs, ours = pair(**extra)
    args = qkv(same=True)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    # With more keys than queries torch's hint hides the added key, which its mask does not: there
    # we follow the mask.
    hint = not extra or need_weights or pad != "none"
    mask = {
        "attn_mask": causal,
        "key_padding_mask": padding(pad, True, L),
        "need_weights": need_weights,
    }
    close(ours(*args, **mask, is_causal=True), theirs(*args, **mask, is_causal=hint))
    # Nor does it speak of other keys than queries.
    other = {"attn_mask": masking((2, "bool"), True), "need_weights": need_weights}
    close(ours(*(args := qkv()), **other, is_causal=True), ours(*args, **other))


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_draws_as_torch_does(need_weights):
    theirs, ours = pair(dropout=0.4)
    for training in (True, False):
        mask = masking((2, "bool"), True)
        agree(
            theirs.train(training),
            ours.train(training),
            qkv(),
            attn_mask=mask,
            need_weights=need_weights,
        )


def test_same_signatures():
    def parameters(f):
        return [(p.name, p.default) for p in inspect.signature(f).parameters.values()]

    assert parameters(MultiheadAttention.forward) == parameters(nn.MultiheadAttention.forward)
    assert parameters(MultiheadAttention.__init__)[:-1] == parameters(
        nn.MultiheadAttention.__init__
    )


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_query_that_sees_nothing_gives_0(need_weights):
    _, ours = pair(bias=False)
    hide = torch.zeros(L, S, dtype=torch.bool)
    hide[1] = True
    args = [x.requires_grad_() for x in qkv()]
    out, weights = ours(*args, attn_mask=hide, need_weights=need_weights)
    assert out[1].eq(0).all() and out.isfinite().all()
    assert weights is None or weights[:, 1].eq(0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_rounding_is_as_torchs(dtype, need_weights):
    theirs, ours = pair()
    args = qkv()
    exact = theirs(*args)[0]
    args = [x.to(dtype) for x in args]
    rounded = theirs.to(dtype)(*args, need_weights=need_weights)[0]
    got = ours.to(dtype)(*args, need_weights=need_weights)[0]
    assert got.dtype == dtype
    assert (got - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 4 * torch.finfo(
        dtype
    ).eps


@pytest.mark.parametrize("build", [{}, {"add_bias_kv": True}], ids=str)
def test_autocast(build):
    theirs, ours = pair(**build, dtype=torch.float32)
    args = [x.float() for x in qkv()]
    with torch.autocast("cpu", torch.bfloat16):
        want, got = theirs(*args, need_weights=False)[0], ours(*args, need_weights=False)[0]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=8e-2, rtol=5e-2)


def test_compiled_whole_and_once():
    _, ours = pair()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for queries, keys in ((4, 6), (5, 8), (9, 9), (6, 4), (3, 17)):
        args, hide = qkv(queries=queries, keys=keys), padding("bool", True, keys)
        close(
            *(run(*args, key_padding_mask=hide, need_weights=False)[0] for run in (compiled, ours))
        )
    assert counter.frame_count == 2
    for got, want in zip(compiled(*args), ours(*args), strict=True):
        close(got, want)


def call(*shapes, **kwargs):
    return lambda: MultiheadAttention(E, H)(
        *map(torch.randn, shapes or ((L, N, E), (S, N, E), (S, N, E))), **kwargs
    )


BAD = {
    "query: got shape (12,), want [L, 12]": call((E,), (S, E), (S, E)),
    "key: got shape (7, 12), want [S, N, 12], batched as the query": call(
        (L, N, E), (S, E), (S, N, E)
    ),
    "value: got shape (7, 2, 12), want [S, 12]": call((L, E), (S, E), (S, N, E)),
    "key.shape[-1]: got 10, want 12": call((L, N, E), (S, N, E - 2), (S, N, E)),
    "value: got shape (8, 2, 12), want as many values as keys": call(
        (L, N, E), (S, N, E), (S + 1, N, E)
    ),
    "key.shape[1]: got 3, want 2, the query's batch": call((L, N, E), (S, N + 1, E), (S, N + 1, E)),
    "attn_mask: got None, want the causal mask, because is_causal": call(is_causal=True),
    "attn_mask: got shape (5, 8), want [5, 7]": call(attn_mask=torch.zeros(L, S + 1)),
    "attn_mask: got shape (2, 5, 7), want [8, 5, 7]": call(attn_mask=torch.zeros(N, L, S)),
    "attn_mask.dtype: got torch.int32, want bool": call(
        attn_mask=torch.zeros(L, S, dtype=torch.int32)
    ),
    "key_padding_mask: got shape (7,), want [2, 7]": call(key_padding_mask=torch.zeros(S)),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_calls(text):
    refused(BAD[text], text)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:.*enable_nested_tensor"
)
@pytest.mark.parametrize(
    "when", ["before", "after"], ids=lambda when: f"replaced-{when}-the-encoder-is-made"
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_inference_paths_call_it(when, padded, norm_first):
    """In eval mode torch's encoder reads the weights of its own attention and never calls it, and
    makes nested tensors of padding."""
    torch.set_default_dtype(torch.float32)
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()

    def replaced(of):
        made = copy.deepcopy(of)
        made.self_attn = MultiheadAttention(16, 4, batch_first=True)
        return made

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore" if norm_first else "error"
        )  # as torch's own the first is made without a warning
        ours = nn.TransformerEncoder(
            replaced(layer) if when == "before" else layer, 2, enable_nested_tensor=True
        ).eval()
    if when == "after":
        ours.layers = nn.ModuleList(replaced(each) for each in ours.layers)
    ours.load_state_dict(theirs.state_dict())
    ours.eval()
    calls = []
    for module in ours.modules():
        if isinstance(module, MultiheadAttention):

            def watched(*args, real=module.forward, **kwargs):
                calls.append(args[0].is_nested)
                return real(*args, **kwargs)

            module.forward = watched
    x, hide = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    hide[0, 4:] = hide[2, 1:] = True
    masks = {"src_key_padding_mask": hide} if padded else {}
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        calls.clear()
        with context:
            got, want = ours(x, **masks), theirs(x, **masks)
        assert len(calls) == 2
        torch.testing.assert_close(got[~hide], want[~hide], atol=2e-5, rtol=2e-5)
    calls.clear()
    with torch.no_grad():
        ours(x, **masks)
    assert calls == [padded and not norm_first] * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("average_attn_weights", [True, False])
def test_weights_of_nested_tensors(layout, average_attn_weights):
    """`[N, L, S]` of the longest lengths, as torch pads them in eval mode, which is all that it
    has; of the rows one by one else."""
    theirs, ours = pair(batch_first=True)
    rows, others = ([torch.randn(n, E) for n in lengths] for lengths in ((2, 4, 1), (3, 1, 5)))
    x, memory = (torch.nested.nested_tensor(part, layout=layout) for part in (rows, others))
    with torch.no_grad():
        strided = torch.nested.nested_tensor(rows)
        want = theirs.eval()(strided, strided, strided, average_attn_weights=average_attn_weights)[
            1
        ]
    close(ours(x, x, x, average_attn_weights=average_attn_weights)[1], want)
    out, weights = ours(x, memory, memory, average_attn_weights=average_attn_weights)
    for one, got, row, other in zip(out.unbind(), weights, rows, others, strict=True):
        alone, want = ours(row, other, other, average_attn_weights=average_attn_weights)
        close(one, alone)
        close(got[..., : len(row), : len(other)], want)
        close(got.sum(), want.sum())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_that_are_refused(layout):
    """What they share with other modules is in tests/test_jagged.py."""
    ours = MultiheadAttention(E, H, batch_first=True)
    right, narrow, deep = (
        torch.nested.nested_tensor([torch.randn(n, *token) for n in (2, 3)], layout=layout)
        for token in ((E,), (E // 2,), (2, E))
    )
    plain = torch.randn(2, 3, E)
    for text, args, more in (
        ("query: got tokens of shape (6,), want (12,)", (narrow, narrow, narrow), {}),
        ("key: got tokens of shape (6,), want (12,)", (right, narrow, narrow), {}),
        ("query: got tokens of shape (2, 12), want (12,)", (deep, right, right), {}),
        ("key, value: got nested tensors, want plain", (plain, right, right), {}),
        (
            "query: got a nested tensor with more",
            (right, right, right),
            {"attn_mask": torch.zeros(3, 3)},
        ),
        ("query: got a nested tensor with more", (right, right, right), {"is_causal": True}),
    ):
        refused(lambda args=args, more=more: ours(*args, need_weights=False, **more), text)


def test_kernel_is_forced():
    args = qkv()
    MultiheadAttention(E, H, kernel="reference")(*args, need_weights=False)
    with pytest.raises(UnknownKernel):
        MultiheadAttention(E, H, kernel="nobody")(*args, need_weights=False)
