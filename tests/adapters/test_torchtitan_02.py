"""torchtitan 0.2's Llama, patched: logits and gradients of its own attention; packed documents;
flex_attention is left alone."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan (extra dev) is not installed")
pytest.importorskip(
    "torchtitan.models.attention", reason="torchtitan 0.3 is installed: see test_torchtitan.py"
)

from torchtitan.models.attention import create_varlen_metadata_for_document
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

import attnops
from attnops.core.errors import PatchError
from tests.adapters.helpers import Calls, Graphs, block, grads, same_grads

EOS = 0
TOKENS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def llama(attn_type):
    torch.manual_seed(0)
    model = Transformer(
        TransformerModelArgs(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=64,
            max_seq_len=32,
            attn_type=attn_type,
        )
    )
    with torch.no_grad():
        model.init_weights()
    return model


def test_llama_forward_and_backward():
    ours, theirs = llama("sdpa"), llama("sdpa")
    with attnops.patch(ours) as handle:
        assert [row.path for row in handle.report().patched] == [
            f"layers.{i}.attention.inner_attention" for i in range(2)
        ]
        with Calls() as calls:
            got = ours(TOKENS)
        assert calls.names == ["attnops::attention"] * 2
        want = theirs(TOKENS)
        torch.testing.assert_close(got, want)
        same_grads(grads(ours, got.square().sum()), grads(theirs, want.square().sum()))
        graphs = Graphs()
        torch.testing.assert_close(
            torch.compile(ours, fullgraph=True, backend=graphs)(TOKENS), want
        )
        assert graphs.count("attnops.attention") == [2]


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents(compiled):
    """Each document as it is alone. torchtitan's own varlen attention needs a GPU."""
    tokens = TOKENS.clone()
    tokens[0, 5] = tokens[1, 9] = EOS
    ours, theirs, graphs = llama("varlen"), llama("sdpa"), Graphs()
    metadata = create_varlen_metadata_for_document(tokens, EOS)
    with attnops.patch(ours):
        run = torch.compile(ours, fullgraph=True, backend=graphs) if compiled else ours
        logits = run(tokens, metadata)
        assert graphs.count("attnops.varlen_attention") == [2] * compiled
        want = torch.empty_like(logits)
        for row, cuts in enumerate([(0, 6, 16), (0, 10, 16)]):
            for start, end in pairwise(cuts):
                # Positions go on within a row, which rotary embedding does not see.
                want[row, start:end] = theirs(tokens[row : row + 1, start:end])[0]
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
        same_grads(grads(ours, logits.square().sum()), grads(theirs, want.square().sum()))


def test_flex_attention_is_left_alone():
    with pytest.raises(
        PatchError, match="FlexAttentionWrapper: its masks are functions of flex_attention"
    ):
        attnops.patch(llama("flex"))


def test_the_page():
    exec(block("TransformerModelArgs"), {})
