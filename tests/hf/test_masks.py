"""A descriptor shows the keys that the written-out mask shows, for every query that is a token; and
holes never become one."""

import random
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import attnops
from attnops.core.errors import InvalidInput
from attnops.hf import tiny
from attnops.hf.attention import descriptor, mask as masks, packed
from attnops.hf.attention.descriptor import Pattern
from attnops.hf.generation import growing
from tests.hf.helpers import generated, left_padded, logits, near, same_tokens, tokens, watched


def make(mode, *args, **kwargs) -> Any:
    return masks.mask_function(mode)(*args, **kwargs)


def shown(mask, queries, keys, batch):
    """bool `[B, S, T]` of what the attention function lets a causal or bidirectional call see."""
    query, key = torch.arange(queries)[:, None], torch.arange(keys)
    if mask is None:
        offset = 0 if queries > 1 else keys - 1  # as the attention function reads None
        return (key <= query + offset).expand(batch, queries, keys)
    if mask.dtype == torch.bool:
        return mask[:, 0].expand(batch, queries, keys)
    if mask.dtype == packed.DTYPE:
        return packed.written_out(packed.read(mask, batch, queries, keys), batch, queries)[:, 0]
    found = descriptor.read(mask, batch)
    start, end = found.start[:, None, None], found.end[:, None, None]
    own = end - queries + query
    right = key <= own if found.causal else True
    left = key >= own - found.window_left if found.window_left >= 0 else True
    return ((start <= key) & (key < end) & right & left).expand(batch, queries, keys)


def case(rng):
    """A forward as transformers makes it: (queries, keys, q_offset, kv_offset, window, columns of
    the 2-D mask)."""
    window = rng.choice([0, 0, 3, 5])
    queries = rng.choice([1, 1, 2, 4, 7])
    past = rng.choice([0, 0, 1, 4, 9])
    kind = rng.choice(["dynamic", "static", "sliding"])
    if kind == "sliding" and window:  # StaticSlidingWindowLayer.get_mask_sizes
        offset = max(past - window + 1, 0)
        keys = (
            window + queries - 1
            if past >= window
            else past + queries
            if past + queries > window
            else window
        )
        return queries, keys, past, offset, window
    if kind == "static":
        return queries, 20, torch.tensor(past) if rng.random() < 0.5 and past else past, 0, window
    return queries, past + queries, past, 0, window


def padding_for(rng, batch, columns):
    """Rows with left padding, right padding, both, none, holes, or nothing at all."""
    rows = torch.zeros(batch, columns, dtype=torch.bool)
    for row in rows:
        a, b = sorted(rng.sample(range(columns + 1), 2)) if rng.random() < 0.5 else (0, columns)
        row[a:b] = True
        if rng.random() < 0.25:
            row[rng.randrange(columns)] = rng.random() < 0.5
    return rows


def arguments(rng, batch=3):
    """Those of a mask function for such a forward, without padding."""
    queries, keys, q_offset, kv_offset, window = case(rng)
    rule = sliding_window_causal_mask_function(window) if window else causal_mask_function
    given = {
        "batch_size": batch,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
    }
    return given | {"mask_function": rule} | ({"local_size": window} if window else {})


@pytest.mark.sweep(5)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("seed", range(300))
def test_compact_shows_what_dense_shows(seed, grad):
    rng = random.Random(seed)
    common = arguments(rng)
    batch, queries, keys = 3, common["q_length"], common["kv_length"]
    total = int(common["q_offset"]) + queries
    padding = padding_for(rng, batch, total) if rng.random() < 0.8 else None
    common["attention_mask"] = padding
    want = sdpa_mask(allow_is_causal_skip=False, **common)[:, 0]
    skip = rng.random() < 0.7
    with torch.set_grad_enabled(grad):
        ours = make(
            "compact", allow_is_causal_skip=skip, config=None, dtype=torch.float32, **common
        )
    if queries == 1 and not skip:
        assert ours is not None, "a compiled step must find a tensor every time"
    tokens_only = (
        torch.ones(batch, queries, dtype=torch.bool)
        if padding is None
        else padding[:, total - queries :]
    )
    assert torch.equal(shown(ours, queries, keys, batch)[tokens_only], want[tokens_only])


@pytest.mark.parametrize("seed", range(60))
def test_bidirectional(seed):
    rng = random.Random(seed)
    batch, queries, keys = 3, rng.choice([1, 4]), rng.choice([1, 5, 8])
    padding = padding_for(rng, batch, keys) if rng.random() < 0.8 else None
    common = {
        "batch_size": batch,
        "q_length": queries,
        "kv_length": keys,
        "mask_function": bidirectional_mask_function,
        "attention_mask": padding,
        "allow_is_causal_skip": False,
    }
    want = sdpa_mask(**common)
    ours = make("compact", allow_is_bidirectional_skip=True, **common)
    if ours is None:
        assert want.all()
    else:
        assert torch.equal(shown(ours, queries, keys, batch), want[:, 0])


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_a_mask_shorter_than_the_text(static, queries):
    """The 2-D mask of the prompt, given again later: transformers takes what it does not cover as
    masked, the queries' own keys too."""
    padding = torch.tensor([[False, True, True, True], [True, True, True, True]])
    common = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": 12 if static else 4 + queries,
        "attention_mask": padding,
    }
    common |= {"q_offset": torch.tensor(4) if static else 4, "mask_function": causal_mask_function}
    want = sdpa_mask(allow_is_causal_skip=False, **common)[:, 0]
    assert torch.equal(shown(make("compact", **common), queries, common["kv_length"], 2), want)


def test_while_a_compiler_traces_a_plain_mask_without_padding_is_none(monkeypatch):
    """Sizes tell; transformers writes it out all the same. One that must be found every time, and
    `explicit`, stay tensors."""
    none = 0
    for seed in range(150):
        common = arguments(random.Random(seed))
        queries, keys = common["q_length"], common["kv_length"]
        want = sdpa_mask(allow_is_causal_skip=False, **common)[:, 0].expand(3, queries, keys)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            ours = make("auto", **common)
            for mode, more in (("auto", {"allow_is_causal_skip": False}), ("explicit", {})):
                assert make(mode, **common, **more) is not None
            ones = torch.ones(3, int(common["q_offset"]) + queries, dtype=torch.bool)
            assert make("auto", attention_mask=ones, **common) is not None
        none += ours is None
        assert torch.equal(shown(ours, queries, keys, 3), want)
    assert none > 20


def described(start=1, end=7, window=0):
    return descriptor.build(Pattern(True, window), 2, start, end, 3, 0, torch.device("cpu"))


def test_the_descriptor_takes_no_room():
    mask = described(window=4096)
    assert mask.shape == (2, 1, 4097, 4) and mask.dtype == torch.int64
    assert mask.untyped_storage().nbytes() == 2 * 4 * 8
    found = descriptor.read(mask, 2)
    assert found.window_left == 4095 and found.causal
    assert found.start.is_contiguous() and found.end.is_contiguous()


def ranges(mask, batch=2):
    found = descriptor.read_once(mask, batch)
    return found.start.tolist(), found.end.tolist()


def test_a_descriptor_is_read_once_a_step_and_anew_when_it_was_written():
    mask = described(torch.tensor([0, 3]))
    found = descriptor.read_once(mask, 2)
    assert descriptor.read_once(mask, 2) is found and found.start.dtype == torch.int32
    assert ranges(mask) == ([0, 3], [7, 7])
    mask.copy_(described(end=torch.tensor([5, 6])))
    assert ranges(mask) == ([1, 1], [5, 6])
    with pytest.raises(InvalidInput, match="attention_mask"):
        descriptor.read_once(mask, 3)
    assert ranges(mask[:1], 1) == ([1], [5])
    graphs = []
    compiled = torch.compile(
        lambda m: descriptor.read_once(m, 2).start * 2,
        backend=lambda g, _: graphs.append(g) or g.forward,
    )
    assert (
        compiled(mask).tolist() == [2, 2]
        and compiled(described(4)).tolist() == [8, 8]
        and len(graphs) == 1
    )
    with torch.inference_mode():
        mask = described()
        assert ranges(mask)[0] == [1, 1]
        mask.fill_(3)
        assert ranges(mask)[0] == [3, 3]


def test_a_descriptor_that_a_graph_makes_is_read_every_time():
    """A replay writes its bytes, and no version tells of it; whatever records a graph sees the
    calls of a dispatch mode."""

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Recording():
        mask = described()
    traced = torch.compile(described, backend="eager")(torch.tensor(1))
    for made, again in ((mask, 5), (mask.detach(), 5), (traced, 5), (described(), 1)):
        assert ranges(made)[0] == [1, 1]
        before = made.clone()
        made.data.copy_(described(5))
        assert ranges(made)[0] == [again, again]
        made.data.copy_(before)


@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (2, 3, 1, 4), (1, 1, 1, 4)])
def test_another_int_mask_is_an_error(shape):
    with pytest.raises(InvalidInput, match="attention_mask"):
        descriptor.read(torch.zeros(shape, dtype=torch.int64), 2)


# Who may look at the mask -------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """`auto` behaves as on CUDA: lengths, and no look at the mask at one-token steps. Notes the
    length of each call that looked."""
    looks = []
    real = masks._look

    def counting(call, *rest):
        looks.append(call.q_length)
        return real(call, *rest)

    monkeypatch.setattr(masks, "_look", counting)
    monkeypatch.setattr(descriptor, "_FAR", ("cpu",))
    return looks


# Are there masks of the prompt, and of the steps after it? Padding on the right ends a run of ones;
# with ones appended it is a hole.
PROMPTS = {"left": (False, False), "holes": (True, True), "right": (False, True)}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_generate_looks_at_the_prompt_only(impatient, prompt, name, cache):
    model, mask = tiny.model(name), left_padded()[:, :14]
    if prompt == "holes":
        mask[0, 5] = 0
    if prompt == "right":
        mask = mask.flip(1)
    want = generated(model, kind=cache, attention_mask=mask)
    with attnops.patch(model, mask="auto"), watched() as calls:
        ours = generated(model, kind=cache, attention_mask=mask)
    masked = [call["mask"] is not None for call in calls]
    layers = model.config.num_hidden_layers
    assert (set(masked[:layers]), set(masked[layers:])) == tuple({each} for each in PROMPTS[prompt])
    if prompt != "right":
        assert torch.equal(ours, want) and set(impatient) == {14}


def test_generate_from_one_token(impatient):
    same_tokens(tiny.model("llama"), length=1, attention_mask=torch.ones(3, 1, dtype=torch.int64))
    # From 5.23 on transformers hands on no mask without zeros.
    assert impatient in ([1], [])


def test_outside_generate_nothing_is_trusted(impatient):
    padded = torch.tensor([[False, True, True]])
    assert make("auto", 1, 1, 3, 2, 0, attention_mask=padded).dtype == torch.bool
    with growing():
        make("auto", 1, 2, 2, 0, 0, attention_mask=padded[:, :2])
        assert make("auto", 1, 1, 3, 2, 0, attention_mask=padded).dtype == torch.int64
    assert make("auto", 1, 1, 3, 2, 0, attention_mask=padded).dtype == torch.bool


def test_compact_may_look_at_every_step(impatient):
    """What `mask="compact"` asks for, and `auto` does not do: outside generate() a step's mask is
    looked at, and lengths are given."""
    model, ids, mask = tiny.model("llama"), tokens(), left_padded()
    looks: dict[masks.Mode, list[int]] = {"auto": [14, 2], "compact": [14, 1, 1, 2, 1, 1]}
    for mode, looked in looks.items():
        impatient.clear()
        want = logits(tiny.model("llama"), "dynamic", ids, mask)
        with attnops.patch(model, mask=mode):
            near(logits(model, "dynamic", ids, mask), want)
        assert impatient == looked


def test_one_bad_mask_spoils_a_generation(impatient):
    good, bad = torch.tensor([[False, True, True]]), torch.tensor([[True, False, True]])
    with growing():
        make("auto", 1, 3, 3, attention_mask=good)
        make("auto", 1, 3, 3, attention_mask=bad)
        make("auto", 1, 3, 3, attention_mask=good)
        assert (
            make("auto", 1, 1, 4, 3, attention_mask=torch.tensor([[False, True, True, True]])).dtype
            == torch.bool
        )


def test_fake_tensors_are_not_looked_at():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        mask = make("compact", 2, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool))
    assert mask.dtype == torch.bool


def test_a_compiled_mask_is_guarded_on_no_generation():
    counter, padded = CompileCounter(), torch.tensor([[False, True, True]])
    compiled = torch.compile(
        lambda mask: make("compact", 1, 3, 3, attention_mask=mask), backend=counter, fullgraph=True
    )
    want = compiled(padded)
    with growing():
        assert torch.equal(compiled(padded), want)
    assert counter.frame_count == 1
