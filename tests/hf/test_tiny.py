"""The bundled models: complete, reproducible, and gone without a trace in the random state."""

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.hf import tiny
from tests.hf.helpers import DEMO, tokens


def test_names():
    assert len(set(tiny.NAMES)) == len(tiny.NAMES) >= 30
    with pytest.raises(InvalidInput, match="no_such"):
        tiny.config("no_such")


def test_seeds():
    state = torch.get_rng_state()
    one, same, other = tiny.model("gpt_oss"), tiny.model("gpt_oss"), tiny.model("gpt_oss", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(one(ids).logits, same(ids).logits)
        assert not torch.equal(one(ids).logits, other(ids).logits)
    assert one.config._attn_implementation == "eager" and not one.training


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_sinks_matter(name):
    model, ids = tiny.model(name), tokens()
    sinks = [p for n, p in model.named_parameters() if n.endswith("sinks")]
    assert sinks
    with torch.no_grad():
        before = model(ids).logits
        for p in sinks:
            p.fill_(-100.0)
        assert not torch.allclose(model(ids).logits, before)


def slides(name):
    try:
        return tiny.config(name).to_dict().get("sliding_window") == 8
    except InvalidInput:  # of a later transformers: test_config has the reason
        return False


@pytest.mark.parametrize("name", [name for name in tiny.NAMES if slides(name)])
def test_windows_are_shorter_than_the_tests_texts(name):
    """A window that never bites would prove nothing."""
    config = tiny.config(name)
    kinds = getattr(config, "layer_types", None)
    assert kinds is None or "sliding_attention" in kinds


@pytest.mark.parametrize("name", DEMO)
def test_demo_models_are_small(name):
    model = tiny.model(name)
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 2e7
    assert model.generate(tokens(1, 4), max_new_tokens=2, do_sample=False).shape == (1, 6)
