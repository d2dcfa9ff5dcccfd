"""A stand-in for CUDA graphs on a CPU: work between begin and end is recorded op by op with its
tensors, and a replay does it again.

As on a GPU, a replay reads what the captured addresses hold by then and writes where the capture
wrote. A buffer that was allocated in a capture holds NaN at a replay until something is written
there; and memory of a capture that nobody held any more when a later one began holds NaN once that
one is replayed, for it may have put other things there; so does memory that nobody held any more
when something was made later in the same capture. Inductor's code is one call without ops: `opaque`
makes it one.
"""

import weakref
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from attnops.graphs.streams import LastStream

ALLOCATIONS = ("aten::empty", "aten::new_empty")


def tensors(x):
    """Those of an operator's arguments or results. (torch's pytrees take ten times as long.)"""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return []
    return [t for each in x for t in tensors(each)]


def storage(t):
    return t.untyped_storage().data_ptr()


def alias(x):
    """The same memory in other objects, so that who else holds it can be told."""
    if isinstance(x, Tensor):
        return x.detach()
    if isinstance(x, dict):
        return {name: alias(each) for name, each in x.items()}
    if isinstance(x, (tuple, list)):
        return [alias(each) for each in x]
    return x


def unheld(entry):
    """Whether nobody holds memory that a capture made."""
    return all(ref() is None for ref in entry[1])


def poison(t):
    t.fill_(float("nan") if t.is_floating_point() else True if t.dtype == torch.bool else -77)


class Recorded:
    """log: what was done, as (name, addresses of what it reads). over: memory that it may have used
    anew. held: what somebody holds, with references."""

    def __init__(self, device):
        self.device = device
        self.held = [*device.made.values()]
        self.over = self.dead()
        self.work = []
        self.log = []
        self.replays = 0
        self.alive = True
        self.bytes = 0

    def dead(self):
        """Memory that nobody holds any more."""
        found = [entry[0] for entry in self.held if unheld(entry)]
        if found:
            self.held = [entry for entry in self.held if not unheld(entry)]
        return found

    def add(self, name, run, args, out):
        read, results, made = tensors(args), tensors(out), self.device.made
        given = {storage(t) for t in read}
        if {storage(t) for t in results} - given:
            self.work.extend(("dies", None, [t]) for t in self.dead())
        self.log.append((name, tuple(t.data_ptr() for t in read)))
        for t in results:
            if (at := storage(t)) not in given:
                made[at] = (alias(t), [])
                self.held.append(made[at])
                self.bytes += t.nbytes
            if at in made:
                made[at][1].append(weakref.ref(t))
        self.work.append((name, run, alias(results)))

    def replay(self):
        assert self.alive, "a graph was replayed after reset()"
        self.replays += 1
        self.device.calls.append("replay")
        self.device.pool.zero_()  # all graphs of a device use the memory of one pool
        for t in self.over:
            poison(t)
        for name, run, out in self.work:
            if name.startswith(("dies", *ALLOCATIONS)):
                for t in out:
                    poison(t)
                continue
            for old, new in zip(out, tensors(run()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape, f"{name}: the shape depends on data"
                    old.copy_(new)

    def reset(self):
        self.alive = False
        self.work.clear()


class _Recorder(TorchDispatchMode):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.device.call(func, args, kwargs or {})


class StandIn:
    """calls: begin, end, abort and replay in order. graphs: all that were captured. need: answers
    how many bytes a run needs.

    made: memory of captures by address, with references to what was given it.
    """

    def __init__(self, need=lambda: 0):
        self.need = need
        self.open, self.calls, self.graphs, self.made = None, [], [], {}
        self.recorder = _Recorder(self)
        self.last = LastStream(torch.device("cpu"))
        self.pool = torch.zeros(1, device="cpu")

    @contextmanager
    def session(self):
        yield
        assert self.open is None

    def begin(self):
        assert self.open is None, "begin() within a capture"
        self.calls.append("begin")
        self.open = Recorded(self)
        self.watch(True)

    def watch(self, on):
        """The recorder sees ops after every mode of the step, and the step does not know of it."""
        above = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
        assert (self.recorder in above) is not on
        for mode in reversed([m for m in above if m is not self.recorder] + [self.recorder] * on):
            _push_mode(mode)

    def call(self, op, args, kwargs):
        out = op(*args, **kwargs)
        if self.open is not None:
            given, named = alias((args, kwargs))
            self.open.add(op.name(), lambda: op(*given, **named), (args, kwargs), out)
        return out

    def opaque(self, call):
        """`call` as one operation. What it reads is unknown, so none of its memory counts as its
        own."""

        def one(*given):
            if self.open is None:
                return call(*given)
            self.watch(False)
            out = call(*given)
            self.watch(True)
            self.open.work.append(("call", lambda: call(*given), tensors(out)))
            return out

        return one

    def end(self):
        self.watch(False)
        graph, self.open = self.open, None
        assert graph is not None
        self.calls.append("end")
        self.graphs.append(graph)
        return graph

    def abort(self):
        self.watch(False)
        self.calls.append("abort")
        self.open = None

    def weak(self, tensor):
        return alias(tensor)

    def warm(self, run):
        assert self.open is None
        run()

    def measured(self, run):
        self.warm(run)
        return self.need()

    def follow(self):
        self.last.use()

    def used(self):
        return sum(g.bytes for g in self.graphs if g.alive)

    def settle(self):
        self.calls.append("settle")

    def release(self):
        # Those of another step on the same device may live on; a test of one step sees the
        # difference.
        self.calls.append(
            "release while graphs hold it" if any(g.alive for g in self.graphs) else "release"
        )
