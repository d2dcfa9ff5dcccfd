"""Masks of packed requests: what they show, which rules they stand for, and the calls that need all
pairs of tokens after all."""

import inspect
import random
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import attnops
from attnops.core import eager_cache
from attnops.core.errors import InvalidInput, NoKernel
from attnops.hf import tiny
from attnops.hf.attention import descriptor, mask as masks, packed
from attnops.hf.attention.function import attention_function
from attnops.hf.cache.names import named
from tests.hf.helpers import watched
from tests.hf.test_attention import close, plain, qkv

MODULE = types.SimpleNamespace(training=False, is_causal=True)
TRAINED = types.SimpleNamespace(training=True, is_causal=True)
attend = attention_function(None)
CPU = torch.device("cpu")
STARTS = torch.tensor([0, 3, 6], dtype=torch.int32)


def make(rule, batch, length, **more) -> Any:
    given = {"allow_is_causal_skip": False, "device": CPU, **more}
    return masks.mask_function("auto")(batch, length, length, mask_function=rule, **given)


IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
SEE = (IDS[:, :, None] == IDS[:, None, :])[:, None] & torch.ones(6, 6, dtype=torch.bool).tril()


def packed_mask(window=0, ids=IDS):
    first = sliding_window_causal_mask_function(window) if window else causal_mask_function
    return make(and_masks(first, packed_sequence_mask_function(ids)), len(ids), 6)


CU = torch.tensor([0, 2, 5, 6], dtype=torch.int32)


def lengths_of(cu, longest):
    return {
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def random_documents(rng, batch, length):
    """int64 `[B, S]`: the document of each token."""
    return (
        torch.tensor([[rng.random() < 0.3 for _ in range(length)] for _ in range(batch)]).cumsum(-1)
    ).long()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_documents(seed, traced, monkeypatch):
    rng = random.Random(seed)
    batch, length, window = rng.choice([1, 2, 3]), rng.choice([2, 7, 40]), rng.choice([0, 1, 3, 9])
    ids = random_documents(rng, batch, length)
    first = sliding_window_causal_mask_function(window) if window else causal_mask_function
    rule = and_masks(first, packed_sequence_mask_function(ids))
    local = {"local_size": window} if window else {}
    want = sdpa_mask(batch, length, length, mask_function=rule, allow_is_causal_skip=False)
    with monkeypatch.context() as patched:
        if traced:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
        mask = make(rule, batch, length, **local)
    if traced and masks._JOINED_LAST and not masks._SHOWN:
        # Dynamo shows no closure before torch 2.15, so such rules are written out.
        assert mask.dtype == torch.bool and torch.equal(mask, want.expand(mask.shape))
        return
    found = packed.read(mask, batch, length, length)
    assert mask.dtype == packed.DTYPE and torch.equal(
        packed.written_out(found, batch, length), want.expand(batch, 1, length, length)
    )
    longest = int(found.starts.diff().max())
    assert longest <= found.longest <= length and found.longest - longest <= (
        length if traced else length / packed.PARTS + 1
    )
    assert (found.starts.diff()[:-1] > 0).all()


BLOCKS, CHUNKS = torch.tensor([[0, 0, 1, 1, -1, -1]]), torch.zeros(1, dtype=torch.int64)
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocks": (or_masks(causal_mask_function, blockwise_overlay(BLOCKS)), {}),
    "chunks": (
        chunked_causal_mask_function(4, CHUNKS),
        {"local_size": 4, "config": types.SimpleNamespace(attention_chunk_size=4)},
    ),
    "both sides": (
        sliding_window_bidirectional_mask_function(3),
        {"local_size": 3, "allow_is_bidirectional_skip": False},
    ),
    "bidirectional": (bidirectional_mask_function, {"allow_is_bidirectional_skip": False}),
    "and": (and_masks(causal_mask_function, lambda b, h, q, k: k != 1), {"use_vmap": True}),
    "sliding or": (
        or_masks(sliding_window_causal_mask_function(3), lambda b, h, q, k: k == 5),
        {"local_size": 3},
    ),
    "edited": (causal_mask_function, {}),
}


# Of edited patterns transformers forbids the skip, and a step over a cache is compiled as any
# other.
SKIPPING = [
    (name, queries, "skip")
    for name, (_, more) in OTHERS.items()
    for queries in (1, 6)
    if "local_size" in more
]
WRITTEN = [(name, queries, "no skip") for name in OTHERS for queries in (1, 6)]
COMPILED = [(name, 6, "compiling") for name in OTHERS]


@pytest.mark.parametrize(("name", "queries", "how"), [*SKIPPING, *WRITTEN, *COMPILED])
def test_other_rules_are_written_out(name, queries, how, monkeypatch):
    rule, more = OTHERS[name]
    where = {
        "mask_function": rule,
        "q_offset": 6 - queries,
        "use_vmap": more.get("use_vmap", False),
    }
    want = sdpa_mask(1, queries, 6, allow_is_causal_skip=False, **where)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: how == "compiling")
    for mode in ("auto", "compact"):
        mask = masks.mask_function(mode)(
            1, queries, 6, **{"config": None, **where, **more}, allow_is_causal_skip=how == "skip"
        )
        assert mask.dtype == torch.bool and torch.equal(mask, want)


def test_other_modes_and_steps_over_a_cache_are_written_out():
    rule = and_masks(causal_mask_function, packed_sequence_mask_function(IDS))
    for mode in ("dense", "explicit"):
        assert (
            masks.mask_function(mode)(2, 6, 6, mask_function=rule, allow_is_causal_skip=False).dtype
            == torch.bool
        )
    assert masks.mask_function("dense")(2, 5, 5) is None
    assert masks.mask_function("explicit")(2, 5, 5).shape == (2, 1, 5, 5)
    for more in (
        {"q_offset": torch.tensor(0)},
        {"attention_mask": torch.ones(2, 6, dtype=torch.bool)},
    ):
        assert make(rule, 2, 6, **more).dtype == torch.bool


def test_documents_that_cannot_be_counted_are_written_out(monkeypatch):
    """While a CUDA graph is captured the host must not wait, and fake tensors without symbols have
    no size for their number."""
    with monkeypatch.context() as patched:
        for module in (masks, eager_cache):
            patched.setattr(module, "capturing", lambda tensor: True)
        mask = packed_mask()
    assert mask.shape[3] == 13 and torch.equal(
        packed.written_out(packed.read(mask, 2, 6, 6), 2, 6), SEE
    )
    for env, size in ((None, 13), (ShapeEnv(), None)):
        with FakeTensorMode(shape_env=env, static_shapes=True) as mode:
            fake = and_masks(
                causal_mask_function, packed_sequence_mask_function(mode.from_tensor(IDS))
            )
            found = make(fake, 2, 6).shape[3]
            assert found == size if size else isinstance(found, torch.SymInt)


def test_padding_is_cut_in_short_requests():
    text = torch.zeros(2, 300, dtype=torch.bool)
    text[0, 290:], text[1, 10:140] = True, True
    found = packed.read(packed.build(packed.runs(text), 0, traced=False), 2, 300, 300)
    assert (
        found.starts.tolist() == [0, 128, 256, 290, 300, 310, 440, 556, 600]
        and found.longest == 132
    )
    [end] = packed.runs(torch.zeros(1, 8192, dtype=torch.bool)).nonzero()[-1:, 1].tolist()
    assert end == 8192 - 512, "a long row has longer pieces"


@pytest.mark.parametrize("window", [0, 2])
def test_the_attention_function(window):
    q, k, v = qkv()
    see = SEE & torch.ones(6, 6, dtype=torch.bool).triu(1 - window) if window else SEE
    with watched() as calls:
        ours, none = attend(MODULE, q, k, v, packed_mask(window), softcap=3.0)
    [call] = calls
    assert none is None and ours.shape == (2, 6, 4, 16) and ours.is_contiguous()
    assert (
        call["op"] == "varlen_attention"
        and call["cu_seqlens_q"].tolist() == [0, 2, 5, 6, 12]
        and not call["padded"]
    )
    close(ours, plain(q, k, v, see=see, softcap=3.0))


def test_calls_that_need_all_pairs():
    """Weights, dropout and a position bias: no kernel of packed requests has them. A kernel of the
    dense op alone is asked for that op."""
    q, k, v = qkv()
    bias, mask = torch.randn(1, 4, 6, 6), packed_mask()
    ours, weights = attend(MODULE, q, k, v, mask, output_attentions=True)
    close(ours, plain(q, k, v, see=SEE))
    assert weights is not None and not weights[~SEE.expand_as(weights)].any()
    close(attend(MODULE, q, k, v, mask, position_bias=bias)[0], plain(q, k, v, see=SEE, bias=bias))
    torch.manual_seed(0)
    dropped = attend(TRAINED, q, k, v, mask, dropout=0.5)[0]
    torch.manual_seed(0)
    close(dropped, attend(TRAINED, q, k, v, SEE, dropout=0.5)[0])
    with pytest.raises(NoKernel, match="cudnn"):
        attention_function("cudnn")(MODULE, q, k, v, mask)


def test_lengths_take_the_place_of_documents():
    q, k, v = (x[:1] for x in qkv())
    lengths = lengths_of(CU, 3)
    for mask in (packed_mask(ids=IDS[:1]), packed.whole(1, 6, 0, CPU)):
        with watched() as calls:
            ours = attend(MODULE, q, k, v, mask, **lengths)[0]
        assert [call["cu_seqlens_q"] is CU for call in calls] == [True]
        close(ours, plain(q, k, v, see=SEE[:1]))
        close(attend(MODULE, q, k, v, mask, output_attentions=True, **lengths)[0], ours)
    with pytest.raises(InvalidInput, match="a batch of 2"):
        attend(MODULE, *qkv(), packed_mask(), **lengths)
    with pytest.raises(InvalidInput, match="cu_seq_lens_q: got no max_length_q, want one row"):
        attend(MODULE, q, k, v, packed_mask(ids=IDS[:1]), **lengths | {"max_length_q": None})


@pytest.mark.parametrize("window", [0, 3])
def test_lengths_beside_padding_keep_it_hidden(window):
    """In grad mode as without it, where the mask of a padded row is a range of keys."""
    q, k, v = (x[:1] for x in qkv())
    text = torch.tensor([[False, False, True, True, True, True]])
    lengths = lengths_of(torch.tensor([0, 4, 6], dtype=torch.int32), 4)
    rule, local = (
        (sliding_window_causal_mask_function(window), {"local_size": window})
        if window
        else (causal_mask_function, {})
    )
    given = {"mask_function": rule, "attention_mask": text, "device": CPU, **local}
    see = sdpa_mask(1, 6, 6, mask_function=rule, attention_mask=text, allow_is_causal_skip=False)
    see[..., 4:, :4] = False
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            mask = masks.mask_function("compact")(1, 6, 6, **given)
            ours = attend(MODULE, q, k, v, mask, **lengths)[0]
        assert mask.dtype == (packed.DTYPE if grad else descriptor.DTYPE)
        close(ours[:, 2:], plain(q, k, v, see=see)[:, 2:])


def test_as_many_starts_as_keys_have_another_shape_than_a_mask():
    q, k, v = (x[:1] for x in qkv())
    mask = packed_mask(ids=torch.tensor([[0, 0, 1, 2, 3, 4]]))
    assert mask.shape[3] == packed.whole(5, 6, 0, CPU).shape[3] == 7
    close(attend(MODULE, q, k, v, mask)[0][:, 2:], v.repeat_interleave(2, 1).transpose(1, 2)[:, 2:])


def test_rows_of_one_request_each_are_dense():
    q, k, v = qkv()
    with watched() as calls:
        ours = attend(MODULE, q, k, v, packed.whole(2, 6, 3, CPU))[0]
    assert [(call["op"], call["mask"], call["window"]) for call in calls] == [
        ("attention", None, (2, -1))
    ]
    close(ours, plain(q, k, v, see=torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)))


@pytest.mark.parametrize("mask", ["auto", "dense"])
@pytest.mark.parametrize(("name", "cached"), [("gpt_oss", False), ("llama", True)])
def test_documents_that_positions_do_not_keep_apart_are_told(name, cached, mask):
    """gpt-oss makes its masks without positions, and every model does so beside a cache. Once, and
    for no other call."""
    model, ids = tiny.model(name), torch.full((2, 6), 5)
    where = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    one = {"input_ids": ids, "use_cache": cached}
    kept_apart: list[dict[str, Any]] = [
        {},
        {"position_ids": torch.arange(6)[None]},
        {"position_ids": where, "attention_mask": torch.ones_like(ids)},
        {
            "input_ids": ids[:1],
            "position_ids": where[:1],
            "use_cache": False,
            **lengths_of(STARTS, 3),
        },
    ]
    with torch.no_grad(), attnops.patch(model, mask=mask):
        for more in (
            *kept_apart,
            *([{"position_ids": where, "use_cache": False}] if name == "llama" else []),
        ):
            model(**one | more)
        with pytest.warns(
            UserWarning,
            match=f"within a row of {type(model).__name__}.*return_flash_attn_kwargs=True",
        ) as told:
            model(**one, position_ids=where)
        assert [w.filename for w in told] == [__file__]
        model(**one, position_ids=where)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 2),
        (3, 1, 1, 4),
        (1, 33, 1, 4),
        (1, 0, 1, 4),
        (1, 1, 1, 14),
        (1, 1, 4),
        (1, 1, 6, 6),
        (2, 1, 6, 6),
        (2, 4, 6, 6),
    ],
)
def test_another_int32_mask_is_an_error(shape):
    with pytest.raises(InvalidInput, match="attention_mask"):
        attend(MODULE, *qkv(), torch.zeros(shape, dtype=torch.int32))
    with pytest.raises(InvalidInput, match="attention_mask"):
        attend(MODULE, *qkv(6, 9), packed_mask())


def test_blocks_that_see_both_ways_are_no_documents_to_a_compiler():
    """PaliGemma's prompts, and the prefix of pi0."""
    if "block_sequence_ids" not in inspect.signature(masking_utils.create_causal_mask).parameters:
        pytest.skip("this transformers has no such blocks")
    config = tiny.config("llama")
    config._attn_implementation = "attnops"
    x, places = torch.zeros(2, 6, 8), torch.arange(6)[None]
    blocks = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])

    def masked(x):
        return masking_utils.create_causal_mask(
            config=config,
            inputs_embeds=x,
            attention_mask=None,
            position_ids=places,
            block_sequence_ids=blocks,
            **named(None),
        )

    want = masked(x)
    assert want.dtype == torch.bool and want[0, 0, 0].tolist() == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert torch.equal(torch.compile(masked, backend="eager", fullgraph=True)(x), want)
