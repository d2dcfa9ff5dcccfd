"""torch.nn.TransformerEncoder and its kin, patched: ours in eval mode, too, with every mask, and
with gradients."""

import pytest
import torch
from torch import nn

import attnops
from tests.adapters.helpers import Calls, Graphs, grads, same_grads

PADDING = torch.tensor([[False] * 9, [False] * 6 + [True] * 3])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(9)
GAPS = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)).gt(0.7).fill_diagonal_(False)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "left padding": {"src_key_padding_mask": PADDING.flip(1)},
    "gaps": {"mask": GAPS},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "both": {"mask": CAUSAL.isinf(), "src_key_padding_mask": PADDING, "is_causal": True},
}
X = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))


def encoder(batch_first=True, dropout=0.0):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:.*enable_nested_tensor"
)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("mode", ["eval", "eval with gradients", "train"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder(masks, mode, batch_first):
    ours, theirs = (encoder(batch_first).train(mode == "train") for _ in range(2))
    seen = ~MASKS[masks].get("src_key_padding_mask", torch.zeros(2, 9, dtype=torch.bool))
    x, seen = (X, seen) if batch_first else (X.transpose(0, 1), seen.t())
    packed = (
        mode == "eval" and masks == "padding" and batch_first
    )  # torch makes a nested tensor of it
    with torch.set_grad_enabled(mode != "eval"), attnops.patch(ours):
        want = theirs(x, **MASKS[masks])
        with Calls() as calls:
            got = ours(x, **MASKS[masks])
        assert calls.names == ["attnops::varlen_attention" if packed else "attnops::attention"] * 2
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=1e-5)
        if mode != "eval":
            same_grads(
                grads(ours, got[seen].square().sum()), grads(theirs, want[seen].square().sum())
            )
        elif masks in ("padding", "causal") and batch_first:
            graphs = Graphs()
            got = torch.compile(ours, fullgraph=True, backend=graphs)(x, **MASKS[masks])
            torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=1e-5)
            assert graphs.count("attnops.") == [2]


def test_the_parameters_are_shared():
    ours = encoder(dropout=0.5)
    attention = ours.layers[0].self_attn
    weight, keys = attention.in_proj_weight, list(ours.state_dict())
    with attnops.patch(ours), Calls() as calls:
        assert attention.in_proj_weight is weight and list(ours.state_dict()) == keys
        assert isinstance(attention, attnops.nn.MultiheadAttention)
        assert ours(X).isfinite().all() and not ours(X).equal(ours(X)) and not calls.names, (
            "dropout is torch's"
        )
    assert (
        type(attention) is nn.MultiheadAttention
        and attention._qkv_same_embed_dim
        and "kernel" not in vars(attention)
    )


def test_decoder_and_weights():
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True).eval()
    with attnops.patch(model) as handle:
        assert (
            len(handle.report().patched) == 3 and "need_weights=False" in handle.report().notes[1]
        )
        assert handle.verify(
            X,
            X[:, :5],
            tgt_mask=CAUSAL[:5, :5],
            tgt_is_causal=True,
            memory_key_padding_mask=PADDING,
        ).passed
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    _, want = attention(X, X, X)
    with attnops.patch(attention):
        torch.testing.assert_close(attention(X, X, X)[1], want)
