"""A stand-in for CUDA graphs on a CPU: work between begin and end is recorded op by op with its tensors, and a replay does it again.

As on a GPU, a replay reads what the captured addresses hold by then and writes where the capture wrote. A buffer that was allocated in
a capture holds NaN at a replay until something is written there, and what was made `weak` before a capture holds NaN when that is
replayed, for a GPU may have put other things there. Inductor's code is one call without ops: `opaque` records it as such.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("aten::empty", "aten::new_empty")


def tensors(x):
    return [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]


def storage(t):
    return t.untyped_storage().data_ptr()


def poison(t):
    t.fill_(float("nan") if t.is_floating_point() else -77)


class Recorded:
    """`log`: what was done, as (name, addresses of what it reads)."""

    def __init__(self, device):
        self.device, self.work, self.log, self.replays, self.alive = device, [], [], 0, True
        self.bytes, self.over = 0, []

    def add(self, name, run, args, out):
        given = {storage(t) for t in tensors(args)}
        self.device.made.update(storage(t) for t in tensors(out) if storage(t) not in given)
        self.work.append((name, run, out))
        self.log.append((name, tuple(t.data_ptr() for t in tensors(args))))
        self.bytes += sum(t.nbytes for t in tensors(out) if storage(t) not in given)

    def replay(self):
        assert self.alive, "a graph was replayed after reset()"
        self.replays += 1
        self.device.calls.append(("replay", id(self)))
        for t in self.over:
            poison(t)
        for name, run, out in self.work:
            if name.startswith(ALLOCATIONS):
                for t in tensors(out):
                    poison(t)
                continue
            for old, new in zip(tensors(out), tensors(run()), strict=True):
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
    """calls: begin, end, abort, replay in order. graphs: all that were captured. need: answers how many bytes `measured` says a run needs; weakened: what may be overwritten."""

    def __init__(self, opaque=False, need=lambda: 0):
        self.opaque, self.need = opaque, need
        self.open, self.calls, self.graphs, self.sessions, self.weakened, self.made = None, [], [], 0, [], set()

    @contextmanager
    def session(self):
        self.sessions += 1
        yield
        assert self.open is None

    def begin(self):
        assert self.open is None, "begin() within a capture"
        self.calls.append(("begin",))
        self.open = Recorded(self)

    def call(self, op, args, kwargs):
        out = op(*args, **kwargs)
        if self.open is not None:
            self.open.add(op.name(), lambda: op(*args, **kwargs), (args, kwargs), out)
        return out

    def end(self):
        graph, self.open = self.open, None
        assert graph is not None
        self.calls.append(("end",))
        self.graphs.append(graph)
        return graph

    def abort(self):
        self.calls.append(("abort",))
        self.open = None

    def capture(self, run):
        self.begin()
        # A captured call owns what it needs; between begin and end the running function may hold more, of which nothing is known.
        self.open.over = list(self.weakened)
        try:
            with nullcontext() if self.opaque else _Recorder(self):
                out = run()
        except BaseException:
            self.abort()
            raise
        if self.opaque:
            self.open.add("call", run, (), out)
        return self.end(), out

    def weak(self, tensor):
        if storage(tensor) in self.made and tensor.dtype != torch.bool:
            self.weakened.append(tensor)
        return tensor

    def measured(self, run):
        assert self.open is None
        run()
        return self.need()

    def used(self):
        return sum(g.bytes for g in self.graphs if g.alive)
