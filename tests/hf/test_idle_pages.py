"""The sizes of new pages of `generate()`."""

import pytest
import torch

from attnops.hf import tiny
from attnops.hf.cache import idle_pages
from attnops.hf.cache.page_sizes import Sizes
from attnops.hf.models.states import StateSizes
from attnops.ops import paged_layers
from tests.hf.decoding import generated
from tests.hf.helpers import paged

LAYERS = paged_layers(4, 2, 16, 0, torch.float32, 16)
ROW_BYTES = 3 * 2 * 2 * 16 * 4
"""Of a token in three layers: keys and values of two heads of 16 float32."""


STATES = StateSizes(torch.Size((24, 4)), torch.float32, torch.Size((2, 16, 36)), torch.bfloat16)
"""Two such layers keep of a row the bytes of seven tokens."""


def sizes_of(rows, length, memory, monkeypatch, states=()):
    monkeypatch.setattr(idle_pages, "gpu_bytes", lambda device: memory)
    sizes = Sizes(rows, length, (LAYERS,) * 3, torch.device("cpu"), None, states=states)
    return idle_pages._rounded(sizes)[:2]


@pytest.mark.parametrize(
    ("rows", "length", "tokens", "want"),
    [
        (1, 100, 5000, 4608),  # room for more than 4,608 tokens
        (1, 100, 1000, 768),  # as many as there is room for, in steps of 256
        (2, 100, 1000, 256),
        (8, 100, 100, 104),  # no room: as without a GPU
        (3, 100, 5000, (4, 1024)),  # as many as of four rows
        (3, 100, 350, 104),  # no room for a row more
        (1, 3000, 4500, 4352),  # as many as of a shorter prompt
        (1, 3000, 3000, 3072),
        (1, 2047, 5000, 4608),
    ],
)
def test_new_pages_have_room_for_some_tokens(rows, length, tokens, want, monkeypatch):
    """And rows, in a part of a GPU's memory."""
    memory = idle_pages.SMALL * tokens * ROW_BYTES
    wanted = want if isinstance(want, tuple) else (rows, want)
    assert sizes_of(rows, length, memory, monkeypatch) == wanted
    without = {100: 104, 2047: 2048, 3000: 3072}[length]  # rounded up by an eighth at most
    assert sizes_of(rows, length, float("inf"), monkeypatch) == (rows, without)


@pytest.mark.parametrize(
    ("rows", "tokens", "want"),
    [
        (3, 443, (3, 104)),  # 4 rows of 104 + 7 tokens are 444
        (3, 444, (4, 104)),
        (1, 255, (1, 104)),
        (1, 256, (1, 256)),
    ],
)
def test_rows_of_new_pages_keep_states(rows, tokens, want, monkeypatch):
    """More rows need more states, and more tokens of a row do not."""
    memory = idle_pages.SMALL * tokens * ROW_BYTES
    assert sizes_of(rows, 100, memory, monkeypatch, (STATES,) * 2) == want


def test_a_model_with_a_scripted_module():
    """Which has no dictionary of its modules and hooks as others have."""
    model = tiny.model("llama")
    want = generated(model, 2, 9, 3)
    with paged(model):
        mlp = model.model.layers[0].mlp
        mlp.act_fn = torch.jit.trace(mlp.act_fn, torch.randn(2, 3))
        assert torch.equal(generated(model, 2, 9, 3), want)
