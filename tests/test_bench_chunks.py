"""Exact logits of long prompts: attention in chunks of queries, whose scores fit into memory."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers", reason="the exact models are transformers models")

import attnops.hf
from attnops.bench import Point, Setup, chunks, decode, models
from attnops.core.kernel import kernels_of
from tests.measuring import exchange

TOY = Setup(
    torch.device("cpu"),
    quick=True,
    backend="eager",
    ceilings={"bandwidth_tb_s": 1.0, "matmul_tflop_s": 1.0},
)
CALLS = {
    "plain": (7, 9, {}),
    "causal": (9, 9, {"is_causal": True}),
    "causal_fewer_keys": (9, 5, {"is_causal": True}),
    "causal_more_keys": (5, 9, {"is_causal": True}),
    "shared_keys": (9, 9, {"is_causal": True, "enable_gqa": True}),
    "scale": (7, 9, {"scale": 0.3}),
    "bool": (7, 9, {"attn_mask": torch.arange(126).view(2, 1, 7, 9) % 3 > 0}),
    "bias": (7, 9, {"attn_mask": torch.arange(63.0, dtype=torch.float64).view(7, 9).sin()}),
    "by_key": (7, 9, {"attn_mask": torch.arange(18).view(2, 1, 1, 9) % 3 > 0}),
    "nothing": (0, 9, {}),
}


class Scores(TorchFunctionMode):
    """bytes: of the scores of each call of torch's attention in the block."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            query, key = args[:2]
            rows = query.shape[:-1].numel() * query.element_size()
            self.bytes.append(rows * key.shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("queries_at_once", [1, 3])
def test_chunks_are_the_whole(name, queries_at_once, monkeypatch):
    queries, keys, more = CALLS[name]
    torch.manual_seed(0)
    heads = 4
    query = torch.randn(2, heads, queries, 8, dtype=torch.float64)
    shape = 2, 2 if more.get("enable_gqa") else heads, keys
    key, value = (torch.randn(*shape, d, dtype=torch.float64) for d in (8, 5))
    most = queries_at_once * 2 * heads * keys * 8
    monkeypatch.setattr(chunks, "MOST", most)
    with Scores() as seen, chunks.InChunks():
        got = torch.nn.functional.scaled_dot_product_attention(query, key, value, **more)
    want = scaled_dot_product_attention(query, key, value, **more)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert max(seen.bytes) <= most
    assert len(seen.bytes) == max(1, -(-queries // queries_at_once))


def test_dropout_is_torchs_own(monkeypatch):
    monkeypatch.setattr(chunks, "MOST", 1)
    q = torch.randn(1, 2, 3, 4)
    with Scores() as seen, chunks.InChunks():
        assert not scaled_dot_product_attention(q, q, q, dropout_p=1.0).any()
    assert seen.bytes == [2 * 3 * 3 * 4]


@pytest.mark.parametrize("padded", [False, True])
def test_exact_logits_in_chunks_are_those_of_the_whole(padded, monkeypatch):
    model = models.build(TOY, "llama")
    prompt, new = models.tokens(TOY, model, 2, 33), models.tokens(TOY, model, 2, 3, 1)
    given = {}
    if padded:
        mask = torch.ones(2, 33, dtype=torch.long)
        mask[1, :7] = 0
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    steps = None if padded else new
    want = models.exactly(model, prompt, steps, **given)
    most = 4 * 33 * 2 * model.config.num_attention_heads * 8
    monkeypatch.setattr(chunks, "MOST", most)
    with Scores() as seen:
        got = models.exactly(model, prompt, steps, **given)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert max(seen.bytes) <= most and len(seen.bytes) >= 9 * model.config.num_hidden_layers


def without(*keys):
    """Causal attention of `[1, S, H, D]` that leaves out these keys."""

    def run(call, right):
        _, lse = right(call)
        query = call.query.double()
        groups = query.shape[2] // call.key.shape[2]
        key, value = (t.double().repeat_interleave(groups, 2) for t in (call.key, call.value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        seen[:, list(keys)] = False
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        output = torch.einsum("bhqk,bkhd->bqhd", weights, value)
        return output.to(call.query.dtype).contiguous(), lse

    return run


# A call like an earlier one takes the earlier one's kernel, so that the lengths differ.
@pytest.mark.parametrize(("length", "keys"), [(31, ()), (29, (2,))], ids=["all", "one_dropped"])
def test_a_dropped_token_is_seen_in_chunks(length, keys, monkeypatch):
    """Attention to every token is timed, and one that leaves out a single token is not."""
    monkeypatch.setattr(chunks, "MOST", 4 * 32 * 8 * 8)
    run, patch = kernels_of("attention")["sdpa"].run, attnops.hf.patch
    monkeypatch.setattr(
        attnops.hf, "patch", lambda model, **more: patch(model, kernel="sdpa", **more)
    )
    exchange(monkeypatch, "attention", "sdpa", lambda call: without(*keys)(call, run))
    rows = [*decode.prefill(TOY, models.keeper(TOY), "llama", Point(1, length))]
    ours = [row for row in rows if row["way"].startswith("attnops")]
    assert ours and all(("wrong" in row) is ("median_us" not in row) for row in ours)
    assert {"wrong" in row for row in ours} == {bool(keys)}
