"""Streams on a CPU: nothing runs beside anything, but what would race on a device is found.

Each operation belongs to the current stream. Two operations of two streams race where both use a
storage, one of them writes it, and nothing orders them: no wait of a stream and no read by the
host. The host waits for all that it does on stream 0.
"""

from collections import Counter
from contextlib import contextmanager

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Operations after which the host knows what a stream has done.
WAITING = ("aten::_local_scalar_dense", "aten::equal")


class Races(TorchDispatchMode):
    """A mode, in which streams take the place of torch.cuda's.

    found: the races so far, as texts, each once.
    used: (stream, address) of each tensor whose memory is to wait for the stream.
    """

    def __init__(self):
        super().__init__()
        self.stream, self.found, self.used = 0, {}, []
        # What each stream, and the host, comes after: of each stream the operations so far.
        self._after = {}
        self._host = Counter()
        # By storage: a tensor, which keeps the address, and by (stream, is it written?) the last
        # use, as (time, name).
        self._uses = {}

    @contextmanager
    def on(self, stream):
        """The block runs on this stream, as in torch.cuda.stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def number(self, device):
        return self.stream

    def current(self, device):
        return self.stream

    def capturing(self, device):
        return False

    def beside(self, device):
        return "beside"

    def wait(self, stream, other):
        self._after[stream] = self._after.get(stream, Counter()) | self._after.get(other, Counter())

    def uses(self, stream, tensor):
        self.used.append((stream, tensor.untyped_storage().data_ptr()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        after = self._after[self.stream] = self._after.get(self.stream, Counter()) | self._host
        after[self.stream] += 1
        given = _given(func, args, kwargs)
        written = {id(t) for writes, value in given if writes for t in _tensors(value)}
        for t in _tensors((args, kwargs)):
            self._use(t, id(t) in written, func.name(), after)
        for t in _tensors(out):
            self._use(t, False, func.name(), after)
        if func.name().startswith(WAITING) or self.stream == 0:
            self._host |= after
        return out

    def _use(self, tensor, writes, name, after):
        at = tensor.untyped_storage().data_ptr()
        _, before = self._uses.setdefault(at, (tensor.detach(), {}))
        for (stream, wrote), (time, other) in before.items():
            if (writes or wrote) and stream != self.stream and after[stream] < time:
                two = f"{name} on stream {self.stream}, {other} on stream {stream}"
                self.found[f"{two}, {list(tensor.shape)}"] = None
        before[self.stream, writes] = after[self.stream], name


def _given(func, args, kwargs):
    """(is it written, value) of each argument."""
    named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.name in named:
            info = argument.alias_info
            yield info is not None and info.is_write, named[argument.name]


def _tensors(x):
    return [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
