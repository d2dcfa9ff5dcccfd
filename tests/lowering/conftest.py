"""Models are compiled for inference, unless a test records gradients."""

import pytest
import torch


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield
