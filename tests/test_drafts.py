"""What a draft is shown and what it proposes."""

import pytest
import torch

from attnops.nn import DraftState, Proposal
from tests.modules import refused

B, K, V = 2, 3, 11


def proposal(**changed):
    given = {
        "tokens": torch.zeros(B, K, dtype=torch.int64),
        "parents": torch.full((B, K), -1, dtype=torch.int32),
        "probabilities": torch.zeros(B, K, V),
    }
    return Proposal(**given | changed)


def test_a_proposal_of_the_right_shapes_is_itself():
    chain = proposal(parents=None, probabilities=None)
    assert chain.checked(B, V) is chain
    tree = proposal()
    assert tree.checked(B, V) is tree


@pytest.mark.parametrize(
    ("field", "given", "text"),
    [
        ("tokens", [[1, 2, 3]], "tokens: got list, want a tensor [2, K]"),
        ("tokens", torch.zeros(B * K), "tokens: got shape (6,), want [2, K]"),
        ("tokens", torch.zeros(1, K).long(), "tokens.shape: got (1, 3), want (2, 3)"),
        ("tokens", torch.zeros(B, K).int(), "tokens.dtype: got int32, want int64"),
        ("parents", torch.zeros(B, K + 1).int(), "parents.shape: got (2, 4), want (2, 3)"),
        ("parents", torch.zeros(B, K).long(), "parents.dtype: got int64, want int32"),
        (
            "probabilities",
            torch.zeros(B, K, V - 1),
            "probabilities.shape: got (2, 3, 10), want (2, 3, 11)",
        ),
        (
            "probabilities",
            torch.zeros(B, K, V).half(),
            "probabilities.dtype: got float16, want float32",
        ),
    ],
)
def test_a_proposal_of_other_shapes_is_refused(field, given, text):
    refused(lambda: proposal(**{field: given}).checked(B, V), text)


def test_a_state_is_an_argument_of_compiled_code():
    """Its tensors are the graph's inputs, and a draft that a user writes needs no class of ours."""

    def propose(state):
        rows = torch.arange(B)
        last = state.tokens[rows, state.position]
        return Proposal(last[:, None].expand(B, K).contiguous())

    state = DraftState(
        torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([3, 2], dtype=torch.int32)
    )
    got = torch.compile(propose, fullgraph=True, backend="eager")(state)
    assert got.tokens.tolist() == [[6] * K, [8] * K]
