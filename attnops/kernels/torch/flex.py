"""`flex`: torch.nn.attention.flex_attention, which compiles a kernel for the mask and score
function of the call.

Soft cap, windows, masks, key ranges and sinks all become part of the generated kernel. On CUDA it
is compiled at first use of each shape class; on CPU it runs uncompiled (torch's own unfused code),
which is right but no faster than `reference`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.kernel import Invariant, Kernel, Need, demand, deterministic, device, register
from attnops.core.private_torch import (
    DispatchKey,
    below_autograd,
    dispatch_keys_left,
    dispatch_keys_taken,
    dynamo_config,
    under_dispatch_keys,
)
from attnops.core.problem import Problem, Refusal, Target
from attnops.core.tensors import LEAST, Rules, compact, in_range, lengths_of, near, no_lse, rows_of
from attnops.kernels.shared.parts import FEW_HEADS, in_turns
from attnops.kernels.torch.flex_tiles import BLOCK, shared_bytes, shared_limit, tile
from attnops.measured import Roofline

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from attnops.ops.attention import record as dense, varlen

Mod = Callable[..., Tensor]
"""Of request, head, query and key, each a tensor; a score's first argument is the score."""


@in_turns
def attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    output, lse = attended(call)
    lse = compact(lse.transpose(1, 2).float()) if call.return_lse else no_lse(call.query)
    return compact(output.transpose(1, 2).to(call.query.dtype)), lse


def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    """One long sequence in which a query sees the keys of its own request only."""
    output, lse = packed_attended(call)
    lse = compact(lse.transpose(0, 1).float()) if call.return_lse else no_lse(call.query)
    return compact(output.transpose(0, 1).to(call.query.dtype)), lse


def attended(
    call: dense.Attention | dense.AttentionBackward, recorded: bool = False
) -> tuple[Tensor, Tensor]:
    """output `[B, H, S, Dv]` and lse `[B, H, S]`. recorded: by autograd, for a backward."""
    query, key, value, mask, start, end, rules = (
        call.query,
        call.key,
        call.value,
        call.mask,
        call.kv_start,
        call.kv_end,
        Rules.of(call),
    )
    (batch, queries), keys = query.shape[:2], key.shape[1]
    # of a query's position against its index; a tensor, because Inductor 2.11 takes no sums of
    # sizes from around `visible`
    shift = None
    if end is not None:
        shift = end - queries
    elif queries != keys:
        shift = torch.full((batch,), keys - queries, device=query.device)
    if mask is not None:
        mask = mask.detach().expand(batch, query.shape[2], queries, keys)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        see = j == j if start is None else j >= start[b]
        see = see if end is None else see & (j < end[b])
        return near(see, i if shift is None else i + shift[b], j, rules)

    key, value = in_range(key, start, end), in_range(value, start, end)
    blocks = None
    if not _on_cpu(query) and query.numel() and keys:
        blocks = _block_mask(
            queries, keys, _jointly(dense_blocks, query, keys, start, end, rules, recorded)
        )
    heads_first = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return _flex(
        call,
        heads_first,
        _score(rules, mask, visible, query.device),
        blocks,
        mask is not None,
        recorded,
    )


def packed_attended(
    call: varlen.VarlenAttention | varlen.VarlenAttentionBackward, recorded: bool = False
) -> tuple[Tensor, Tensor]:
    """output `[H, T, Dv]` and lse `[H, T]`. recorded: by autograd, for a backward."""
    query, key, value, rules = call.query, call.key, call.value, Rules.of(call)
    (tokens, heads, _), keys, batch = query.shape, key.shape[0], call.cu_seqlens_q.shape[0] - 1
    if batch == 0:
        return query.new_zeros((heads, tokens, value.shape[2])), query.new_full(
            (heads, tokens), float("-inf"), dtype=torch.float32
        )
    given = call.cu_seqlens_q, call.cu_seqlens_k, tokens, keys, recorded
    # Without tokens or keys there is nothing to compile, and no attention either.
    (row, row_k, shift, first_key), blocks = (
        _jointly(packed_blocks, *given) if tokens and keys else packed_blocks(*given)
    )

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return near(row[i] == row_k[j], i + shift[i], j - first_key[i], rules)

    no_request, unread = row < 0, (row_k >= batch)[:, None, None]
    value = value.masked_fill(
        unread, 0.0
    )  # 0 * NaN is NaN, and keys of no request may hold anything
    if recorded:
        query, key = query.masked_fill(no_request[:, None, None], 0.0), key.masked_fill(unread, 0.0)
    found = None if _on_cpu(query) or not (tokens and keys) else _block_mask(tokens, keys, blocks)
    heads_first = (
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
    )
    output, lse = _flex(
        call, heads_first, _score(rules, None, visible, query.device), found, False, recorded
    )
    return output[0].masked_fill(no_request[:, None], 0.0), lse[0].masked_fill(
        no_request, float("-inf")
    )


def _on_cpu(x: Tensor) -> bool:
    """Does flex run uncompiled, and read every block?"""
    return x.device.type == "cpu"


def _score(rules: Rules, mask: Tensor | None, visible: Mod, device: torch.device) -> Mod:
    # Tensors, because Dynamo makes a float that changes a symbol, and Inductor's flex template
    # takes no symbolic float.
    scale = torch.full((), rules.scale, device=device)
    cap = torch.full((), rules.softcap, device=device) if rules.softcap > 0 else None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s * scale
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        see = visible(b, h, i, j)
        if mask is not None:
            if mask.dtype == torch.bool:
                see = see & mask[b, h, i, j]
            else:
                see = see & (mask[b, h, i, j] != -float("inf"))
                s = s + mask[b, h, i, j]
        # Faint rows have equal logits: the forward is computed twice, and one that is off by a
        # rounding is a weight of infinity.
        return torch.where(see, s.clamp(min=LEAST), -float("inf"))

    return score


Blocks = tuple[Tensor, ...]
"""int32 `[B, query blocks]`, how many key blocks each query block reads, and
`[B, query blocks, key blocks]`, which. For a backward also `[B, key blocks]`, how many query blocks
read each key block, and `[B, key blocks, query blocks]`, which."""


def dense_blocks(
    query: Tensor, keys: int, start: Tensor | None, end: Tensor | None, rules: Rules, recorded: bool
) -> Blocks:
    """The key blocks that some query of a query block sees; flex reads no others. One row serves
    all requests without ranges.

    query: gives the number of queries and the device alone.
    """
    queries, past, bottom = (
        query.shape[1],
        keys if end is None else end[:, None],
        0 if start is None else start[:, None],
    )
    first, last = _edges(queries, query.device)
    shift = past - queries
    low, high = first[None] * 0 + bottom, first[None] * 0 + (past - 1)
    if rules.left >= 0:
        low = torch.maximum(low, first + shift - rules.left)
    if rules.chunk:
        low = torch.maximum(
            low, torch.div(first + shift, rules.chunk, rounding_mode="floor") * rules.chunk
        )
    if rules.causal or rules.right >= 0:
        high = torch.minimum(high, last + shift + (0 if rules.causal else rules.right))
    low, high = torch.broadcast_tensors(low, high)
    return _blocks_between(low, high, keys, recorded)


def packed_blocks(
    cu_q: Tensor, cu_k: Tensor, tokens: int, keys: int, recorded: bool
) -> tuple[Blocks, Blocks]:
    """(int64 request of each query, -1 for none; of each key, B for none; for each query its
    position less its index, and the first key of its request), and the key blocks from the first to
    the last that a query block's requests have. cu_q: of one request or more."""
    batch, starts_k, ends_k = cu_q.shape[0] - 1, cu_k[:-1].long(), cu_k[1:].long()
    row_q, row_k = rows_of(cu_q, tokens), rows_of(cu_k, keys)
    shift, own = lengths_of(cu_k) - lengths_of(cu_q) - cu_q[:-1].long(), row_q.clamp(max=batch - 1)
    by_token = torch.where(row_q < batch, row_q, -1), row_k, shift[own], starts_k[own]
    if not (tokens and keys):
        return by_token, ()
    first, last = (own[i] for i in _edges(tokens, cu_q.device))
    return by_token, _blocks_between(starts_k[first][None], ends_k[last][None] - 1, keys, recorded)


def _edges(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last index of every block of BLOCK among `size` indices."""
    first = torch.arange(0, size, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=size - 1)


def _blocks_between(low: Tensor, high: Tensor, keys: int, recorded: bool) -> Blocks:
    """Query block n reads the blocks of keys `low[:, n]` to `high[:, n]`. low, high:
    `[B, query blocks]`. recorded: also for a backward."""
    count = -(-keys // BLOCK)
    low, high = (
        x.clamp(0, keys - 1) >> BLOCK.bit_length() - 1 for x in (low, high)
    )  # Inductor 2.13 fails to compile the division
    number, every = (high - low + 1).clamp(min=1), torch.arange(count, device=low.device)
    found = [number, (low[..., None] + every).clamp(max=count - 1)]
    if recorded:
        reads = (every >= low[..., None]) & (every < (low + number)[..., None])
        found += [
            reads.sum(1),
            reads.int().argsort(dim=1, descending=True, stable=True).transpose(1, 2),
        ]
    return tuple(x.to(torch.int32) for x in found)


def _block_mask(queries: int, keys: int, blocks: Blocks) -> BlockMask:
    """Of every head. Written out, because torch's own constructors go through vmap, which fails to
    compile inside an op on CUDA with torch 2.11. The dim of heads is added here: flex multiplies by
    its stride, and Inductor makes that 0."""
    from torch.nn.attention.flex_attention import BlockMask

    number, index, *rest = (compact(x)[:, None] for x in blocks)
    readers, reader = rest or (None, None)
    return BlockMask(
        (queries, keys),
        number,
        index,
        None,
        None,
        readers,
        reader,
        None,
        None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_every,
    )


def _every(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j == j


def _flex(
    call: Any,
    given: tuple[Tensor, ...],
    score: Mod,
    blocks: BlockMask | None,
    masked: bool,
    recorded: bool,
) -> tuple[Tensor, Tensor]:
    """output `[B, H, S, Dv]` and lse `[B, H, S]`; a query that sees no key has 0 and -inf, or the
    sink. given: heads first."""
    # Detached: on CPU flex refuses inputs that require grad, in no_grad mode too.
    (query, key, value), sinks = (x if recorded else x.detach() for x in given), call.sinks
    if query.numel() == 0 or key.numel() == 0:
        output = query.new_zeros((*query.shape[:3], value.shape[3]))
        lse = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    else:
        from torch.nn.attention.flex_attention import AuxRequest

        options = _options(
            query, value, masked, recorded, BLOCK if deterministic(call.policy) else key.shape[2]
        )
        with warnings.catch_warnings(), dispatch_keys(recorded):
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            output, aux = _call(query.device.type)(
                query,
                key,
                value,
                score_mod=score,
                block_mask=blocks,
                scale=1.0,
                enable_gqa=query.shape[1] != key.shape[1],
                return_aux=AuxRequest(lse=True),
                **options,
            )
        lse = aux.lse
    if sinks is None:
        return output, lse
    # The sink's logit joins the denominator: output shrinks by exp(lse - lse'), lse' = log(exp(lse)
    # + exp(sink)).
    sink = sinks.to(lse.dtype)[None, :, None].expand_as(lse)
    # A sink of +inf has all of the weight. Its derivative through logaddexp would be NaN.
    whole = sink == float("inf")
    joined = torch.where(whole, sink, torch.logaddexp(lse, torch.where(whole, 0.0, sink)))
    return output * torch.exp(lse - joined)[..., None].to(output.dtype), joined


def _jointly(function: Callable[..., Any], *args: Any) -> Any:
    """`function` of tensors without gradients, on CUDA as one graph: eager code would launch many
    small kernels."""
    given: Tensor = args[0]
    with torch.no_grad(), dispatch_keys():
        return one_graph(function)(*args) if given.device.type == "cuda" else function(*args)


def _call(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    found: Callable[..., Any] = flex_attention
    return one_graph(found) if device == "cuda" else found


@functools.cache
def one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled. Blocks and attention are two graphs, because Inductor 2.11 compiles
    flex for blocks that are inputs alone."""
    compiled, patch = torch.compile(function), dynamo_config().patch

    def call(*args: Any, **kwargs: Any) -> Any:
        # Every structure of mask and score is a graph of its own, and past the limit Dynamo would
        # run them unfused without a word.
        with patch(recompile_limit=512, fail_on_recompile_limit_hit=True):
            return compiled(*args, **kwargs)

    return call


@contextmanager
def dispatch_keys(recorded: bool = False) -> Iterator[None]:
    """The dispatch keys that flex is compiled under and guarded by, whichever way the call came.

    flex is made of torch.vmap, and a dispatch mode switches functorch off while it calls an op, as
    AOTAutograd does with every custom op of a new graph (runtime_wrappers.py, the check for
    aliasing): functorch is on here. The dispatcher leaves autograd before it calls an op, and a
    direct call does not. Dynamo guards on that and would compile every shape twice: autograd is
    left here, too.

    recorded: autograd is on instead.
    """
    off = dispatch_keys_left()
    for name in (*FUNCTORCH, *(AUTOGRAD if recorded else ())):
        off = off.remove(getattr(DispatchKey, name))
    # Autograd is left where that guard is made, not where it is entered.
    guard = under_dispatch_keys(dispatch_keys_taken(), off)
    with guard, nullcontext() if recorded else below_autograd():
        yield


FUNCTORCH = "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"
AUTOGRAD = (
    "AutogradFunctionality",
    "ADInplaceOrView",
    "AutogradOther",
    "AutogradNestedTensor",
    "PythonTLSSnapshot",
)
"""Autograd, and the key by which a dispatch mode above it is found again."""


def _options(
    query: Tensor, value: Tensor, masked: bool, recorded: bool, keys: int
) -> dict[str, Any]:
    if query.device.type == "cpu":
        return {}
    chosen = tile(
        query.shape[3],
        value.shape[3],
        query.dtype.itemsize,
        Target.of(query.device).arch,
        masked,
        keys,
    )
    # The decoding template finds no configuration for some symbolic shapes; the general one always
    # does.
    options = chosen._asdict()
    if recorded:  # torch's own tiles of the backward, but for a mask, which they have no room for
        narrow = dict.fromkeys(
            ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 32
        ) | {"bwd_num_stages": 1}
        options = {f"fwd_{name}": size for name, size in options.items()} | (
            narrow if masked else {}
        )
    return {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True, **options}}


DENSE = Roofline(62.5, 0.079, 0.19, 0.066, 2800)
PACKED = Roofline(105.0, 0.079, 0.059, 0.002, 2000)


def _cost_us(p: Problem) -> float:
    # On a CPU it runs uncompiled and trails the reference.
    return 1e6 if p.target.device == "cpu" else (DENSE if p.op == "attention" else PACKED)(p)


def fitting(p: Problem) -> Refusal | None:
    """The smallest tile fits the shared memory of a program."""
    if p.target.device != "cuda":
        return None
    sizes = (p.head_dim, p.v_head_dim, p.dtype.itemsize, p.target.arch)
    masked = p.rules.mask != "none"
    needed, limit = (
        shared_bytes(tile(*sizes, masked, 1), *sizes, masked),
        shared_limit(p.target.arch),
    )
    want = f"a tile within {limit} bytes of shared memory (takes {needed})"
    return (
        Refusal("head_dim, v_head_dim", (p.head_dim, p.v_head_dim), want)
        if needed > limit
        else None
    )


TAKES = frozenset(
    {"sinks", "causal", "window_left", "window_right", "softcap", "attention_chunk", "return_lse"}
)
NEEDS: tuple[Need, ...] = (
    device("cpu", "cuda"),  # tiles for the shared memory of AMD GPUs are not known here
    demand(
        "group_size",
        "a power of two (CUDA)",
        lambda p: p.group_size & (p.group_size - 1) == 0,
        on="cuda",
    ),
    demand(
        "head_dim, v_head_dim",
        ">= 16 (CUDA)",
        lambda p: min(p.head_dim, p.v_head_dim) >= 16,
        on="cuda",
    ),
    fitting,
    FEW_HEADS,
)
# Under a deterministic policy: uncompiled it multiplies the whole batch, and blocks of keys are
# counted from the first key of all, not from a request's.
STEADY = Invariant(
    (
        device("cuda"),
        demand("kv_range", "no (policy.deterministic)", lambda p: not p.rules.kv_range),
    )
)
for _run, _takes, _steady in (
    (attention, TAKES | {"mask", "kv_start", "kv_end"}, STEADY),
    (varlen_attention, TAKES, None),
):
    register(
        Kernel(
            "flex",
            _run.__name__,
            _run,
            takes=_takes,
            dtypes=(torch.float16, torch.bfloat16, torch.float32),
            needs=NEEDS,
            cost_us=_cost_us,
            invariant=_steady,
            about="torch flex_attention, a kernel compiled for the call's mask",
        )
    )
