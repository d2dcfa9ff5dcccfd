"""Calls that several tests over stand-ins make, and a record of the ops that run."""

from torch.utils._python_dispatch import TorchDispatchMode

from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Source, make_call


def dense(f):
    return make_call("attention", Source(3), 2, 5, 11, f)


def ragged(f):
    """A packed call with requests without queries and without keys, and rows of no request."""
    return make_call(
        "varlen_attention", Source(3), (5, 0, 1, 20, 4), (5, 3, 7, 4, 0), f, padding=(3, 4)
    )


def latents(
    q_lens=(1, 1, 1), seq_lens=(70, 3, 130), page=64, f=DEEPSEEK, padding=0, seed=0, **more
):
    return make_call("mla_attention", Source(seed), q_lens, seq_lens, page, f, padding, **more)


def is_free(op):
    """It launches nothing on a GPU."""
    return op.is_view or "empty" in op.name() or op.name() == "aten::_unsafe_view"


class Ops(TorchDispatchMode):
    """Within the block `calls` gets the op and the arguments of every call that runs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args))
        return func(*args, **kwargs or {})

    @property
    def work(self):
        """The names of the ops but for views, allocations, and ours around the foreign ones."""
        return [
            op._schema.name for op, _ in self.calls if not is_free(op) and op.namespace != "attnops"
        ]

    @property
    def given(self):
        """What the foreign ops of sgl_kernel were called with."""
        return [args for op, args in self.calls if op.namespace == "sgl_kernel"]
