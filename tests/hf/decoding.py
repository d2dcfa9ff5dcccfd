"""What the tests of steps in graphs share: calls of generate(), a stand-in for the device, and a
patched model beside its twin."""

import copy
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

import attnops
from attnops.hf import Decode, tiny
from attnops.hf.cache.names import named
from attnops.hf.steps import prompt
from tests.graphs.standin import StandIn
from tests.hf.helpers import near, paged

CALL = (2, 9, 4)
"""Rows, length of the prompt, new tokens."""


SAMPLED = {"do_sample": True}
ENDS = [*range(3, 128, 4)]
"""So many tokens end a row that rows end at different steps."""

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "temperature": {**SAMPLED, "temperature": 0.6},
    "top_k": {**SAMPLED, "top_k": 5},
    "top_p": {**SAMPLED, "top_k": 0, "top_p": 0.7},
    "min_p": {**SAMPLED, "min_p": 0.1, "temperature": 1.7},
    "penalty": {"repetition_penalty": 1.5},
    "least": {**SAMPLED, "min_new_tokens": 3, "top_p": 0.9, "eos_token_id": ENDS},
    "all": {
        **SAMPLED,
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 0.8,
    },
}


class Streamer:
    """What was put, `None` at the end. stop: the number of the put that raises."""

    def __init__(self, stop=None):
        self.got, self.stop = [], stop

    def put(self, tokens):
        if len(self.got) == self.stop:
            raise KeyError("the streamer's own")
        self.got.append(tokens.tolist())

    def end(self):
        self.got.append(None)


def how(mode="breakable", **more):
    return Decode(mode, **{"inner": "eager", "graphs": StandIn(), **more})


def auto(mode="auto", **more):
    """As on a GPU without options."""
    return how(mode, **{"compile_after": 8, **more})


TIERS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "dense": lambda: {"mask": "dense"},
    "compact": lambda: {"mask": "compact"},
    "pages": lambda: {"cache": "paged"},
    "breakable": lambda: {"cache": "paged", "decode": how()},
    "piecewise": lambda: {"cache": "paged", "decode": how("piecewise", compile_after=0)},
    "recorded": lambda: {"decode": auto(compile_after=99)},
    "auto": lambda: {"decode": auto()},
}
"""Options of `patch`. The first three have transformers' own caches on a CPU. recorded, auto: as on
a GPU without options, the second compiled after eight steps."""


def graphed(model, mode="breakable", **more):
    """A model patched for graphs over pages. more: fields of `Decode`."""
    return paged(model, decode=how(mode, **more))


def asked(rows, length, new):
    ids = torch.randint(
        3, 90, (rows, length), generator=torch.Generator().manual_seed(length + rows), device="cpu"
    )
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, {
        "attention_mask": mask,
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
    }


def generated(model, *call, **more):
    ids, given = asked(*call)
    return model.generate(ids, **given, **more)


def logits(model, *call, **more):
    return torch.stack(
        generated(model, *call, output_logits=True, return_dict_in_generate=True, **more).logits
    )


def turns(model, cache, ids, lengths, pad):
    """Of a conversation of so many new tokens a turn, the answers. Its last one is not in the cache
    when the next turn begins."""
    seen = 0
    for length in lengths:
        seen += length
        mask = torch.ones_like(ids[:, :seen])
        mask[0, :pad] = 0
        given = {"attention_mask": mask, **named(cache), "do_sample": False}
        out = model.generate(ids[:, :seen], **given, max_new_tokens=3, min_new_tokens=3)
        yield out[:, seen:]
        ids = torch.cat([out, ids[:, seen:]], 1)
        seen += 3


def prompts_in_graphs(monkeypatch, *sizes, after=0):
    """Prompts of these sizes are captured after so many of a size."""
    monkeypatch.setattr(prompt, "CAPTURED", sizes)
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", after)


def replays(handle):
    return sum(row.replays for row in handle.graphs.report().rows)


def captures(handle):
    return handle.decode.graphs.calls.count("begin")


def in_threads(run, count=3):
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Beside:
    """A patched model, its handle, and its twin, which is not patched and says what is right."""

    def __init__(self, model, twin, handle):
        self.model, self.twin, self.handle = model, twin, handle
        self.wanted = {}

    def same(self, *call, **more):
        """The tokens of a call are the twin's. more: for the patched model alone. Returns how the
        call ran."""
        if call not in self.wanted:
            self.wanted[call] = generated(self.twin, *call)
        assert torch.equal(generated(self.model, *call, **more), self.wanted[call]), call
        return self.took

    def near(self, *call):
        """The logits of a call are the twin's, which are returned."""
        want = logits(self.twin, *call)
        near(logits(self.model, *call), want)
        return want

    def change(self, change):
        self.wanted.clear()
        for model in (self.model, self.twin):
            change(model)

    @property
    def took(self):
        return self.handle.took

    @property
    def decoder(self):
        return self.handle._paged.decoder()


@contextmanager
def beside(model="llama", mode="breakable", twin=None, kernel=None, **more):
    """A patched model. model: or its family. twin: of it, by default a copy. more: fields of
    `Decode`."""
    model = tiny.model(model) if isinstance(model, str) else model
    twin = copy.deepcopy(model) if twin is None else twin
    # Mode "auto" takes pages by itself, and gives them up with a reason.
    cache = "auto" if mode == "auto" else "paged"
    with attnops.patch(model, cache=cache, kernel=kernel, decode=how(mode, **more)) as handle:
        yield Beside(model, twin, handle)


def first(model="llama", **more):
    """As `beside`, with steps that are not compiled soon."""
    return beside(model, "auto", **{"compile_after": 99, **more})


class Failing(StandIn):
    """Fails at the end of the first captures of each Graphed or tail that is made on it, and before
    them where `early`."""

    def __init__(self, error, times, early=False):
        super().__init__()
        self.error, self.times, self.early, self.tried = error, times, early, 0

    def _fail(self, early):
        if self.early is early and self.tried < self.times:
            self.tried += 1
            raise self.error()

    def warm(self, run):
        self._fail(early=True)
        super().warm(run)

    def end(self):
        self._fail(early=False)
        return super().end()
