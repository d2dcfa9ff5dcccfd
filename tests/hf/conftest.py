"""Skip the folder where transformers is absent; keep it quiet where it is not."""

import gc

import pytest

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
transformers.logging.set_verbosity_error()

LATER = {"kimi_linear": "5.17"}
"""Of families that the oldest transformers does not have: the release that they came with."""


@pytest.fixture(autouse=True)
def _families(monkeypatch):
    """Skip a test where it builds a family that came with a later release of transformers."""
    from attnops.hf import tiny

    config = tiny.config

    def known(name, **overrides):
        if name in LATER and name not in transformers.CONFIG_MAPPING:
            pytest.skip(f"{name} came with the release {LATER[name]} of huggingface/transformers")
        return config(name, **overrides)

    monkeypatch.setattr(tiny, "config", known)


@pytest.fixture(autouse=True)
def _free_drafts(monkeypatch):
    """Of tiny models a draft costs as much as a step, and none would be asked for."""
    from attnops.hf.steps.speculate import Plan

    monkeypatch.setattr(Plan, "cost", lambda plan, owner: 0.0)


@pytest.fixture
def proposed(monkeypatch):
    """Of each round: the tokens that each row's pages keep, and the drafts behind the next one."""
    from attnops.hf.steps.round_graph import Round

    found, own = [], Round.send

    def noted(made, draft):
        found.append((made.stored.clone(), made._drafts[:, 1:].clone()))
        own(made, draft)

    monkeypatch.setattr(Round, "send", noted)
    return found


@pytest.fixture(autouse=True)
def _few_objects(monkeypatch):
    from attnops.graphs import cuda_graphs

    # attnops.patch asks the collector who else holds a config, and that looks at every object that
    # is not frozen: a million where models have been compiled, which takes longer than the rest of
    # most tests here.
    gc.collect()
    gc.freeze()
    # Nor does each capture count them, which takes as long.
    monkeypatch.setattr(cuda_graphs, "_frozen", True)


@pytest.fixture
def small_pages(monkeypatch):
    """The pages that generate() makes: of 4 tokens, so that windows of 8 are shorter than the text.
    They hold NaN where none is stored."""
    from attnops.hf.cache import idle_pages as pool

    made, real = [], pool.ModelPages

    def small(sizes, page_size=None):
        keyed = sizes.layers[0].op == "paged_attention"
        made.append(real(sizes, 4 if keyed and page_size is None else page_size))
        made[-1].forced = page_size
        for pages in made[-1].pools:
            pages.fill_(float("nan"))
        return made[-1]

    monkeypatch.setattr(pool, "ModelPages", small)
    return made


@pytest.fixture
def own_prompts(monkeypatch):
    """The model's own layers run all prompts: none is short."""
    from attnops.hf.steps import prompt

    monkeypatch.setattr(prompt, "CAPTURED", (1,))
