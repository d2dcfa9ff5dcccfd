"""Skip the folder where transformers is absent; keep it quiet where it is not."""

import pytest

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
transformers.logging.set_verbosity_error()
