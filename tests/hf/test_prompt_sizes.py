"""Prompts of many lengths: two recordings of a layer serve the graphs of all sizes."""

import pytest
import torch

from attnops.graphs import kinds
from attnops.graphs.kinds import Kinds
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps import prompt
from tests.hf.decoding import first, logits

LENGTHS = 14, 30, 46, 62, 80


@pytest.fixture
def recorded(monkeypatch):
    """The classes of recorded layers."""
    found, real = [], kinds.record

    def record(module, *given):
        found.append(type(module).__name__)
        return real(module, *given)

    monkeypatch.setattr(kinds, "record", record)
    monkeypatch.setattr(prompt, "CAPTURED", tuple(range(32, 161, 32)))
    return found


def grown(recorded, lengths, call):
    """Call with each length twice. How many recordings each length has added."""
    added = []
    for length in lengths:
        before = len(recorded)
        for took in ("", "captured"):
            assert call(length) == took, length
        added.append(len(recorded) - before)
    return added


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "olmo2", "minicpm3", "phi3"])
def test_prompts_of_other_sizes_record_nothing(recorded, name):
    with first(name) as pair:

        def call(length):
            # The pages of the cache before, which is gone.
            return pair.same(2, length, 1, **named(pair.handle.new_cache(2, 84))).prompt

        one, other, *further = grown(recorded, LENGTHS, call)
        assert one >= other > 0 and not any(further)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_bits_are_those_of_recordings_of_each_size(recorded, name, monkeypatch):
    """Mixtures in bfloat16, for torch's grouped products have no fake result in float32."""

    def captured():
        with first(tiny.model(name).to(torch.bfloat16)) as pair:
            found = []

            def call(length):
                cache = pair.handle.new_cache(2, 84)
                found.append(logits(pair.model, 2, length, 1, **named(cache)))
                return pair.took.prompt

            return found, grown(recorded, LENGTHS, call)

    shared, (*_, last) = captured()
    monkeypatch.setattr(Kinds, "_share", lambda *_: None)
    apart, (*_, each) = captured()
    assert all(map(torch.equal, shared, apart)) and last == 0 < each


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_steps_of_other_rows_record_nothing(recorded, name, monkeypatch):
    """Neither ahead nor before their capture."""
    model = tiny.model(name).to(torch.bfloat16)

    def captured():
        found, added = [], []
        with first(model) as pair:
            del recorded[:]
            for rows in (20, 2, 3, 7, 1, 12):
                before = len(recorded)
                with monkeypatch.context() as patch:
                    patch.setattr(prompt, "CAPTURED", (1,))
                    found.append(logits(pair.model, rows, 9, 4))
                assert pair.took.decode == "breakable"
                added.append(len(recorded) - before)
        return found, added

    shared, (*_, third, fourth, one, last) = captured()
    monkeypatch.setattr(Kinds, "_share", lambda *_: None)
    apart, (*_, each) = captured()
    assert all(map(torch.equal, shared, apart))
    assert third == fourth == one == last == 0 < each


def test_chunks_over_cached_tokens(recorded):
    """They have graphs of their own, which two recordings serve as well."""
    with first() as pair:

        def call(length):
            cache = pair.handle.new_cache(2, 130)
            return pair.same(2, length, 1, prefill_chunk_size=length // 2, **named(cache)).prompt

        assert grown(recorded, (30, 60, 90, 120), call) == [2, 2, 0, 0]
