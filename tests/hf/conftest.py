"""Skip the folder where transformers is absent; keep it quiet where it is not."""

import gc

import pytest

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _few_objects():
    # attnops.patch asks the collector who else holds a config, and that looks at every object that is not frozen: a million where
    # models have been compiled, which takes longer than the rest of most tests here.
    gc.collect()
    gc.freeze()
