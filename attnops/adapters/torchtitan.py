"""Inner attention of torchtitan's models, from torchtitan 0.3 on: torchtitan_02.py serves 0.2.

torchtitan's own door is an override of configs, by which its trainer builds our module:

    --override.imports attnops.adapters.torchtitan.varlen
    --override.imports 'attnops.adapters.torchtitan.varlen={"kernel": "fa4"}'

Letters of shapes, as torchtitan has them: B batch, L sequence, N heads, H head dim, T = B * L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor, nn
from torchtitan.config import derive, override  # pyright: ignore[reportAttributeAccessIssue]
from torchtitan.distributed.utils import (
    get_spmd_backend,  # pyright: ignore[reportAttributeAccessIssue]
    is_in_batch_invariant_mode,  # pyright: ignore[reportAttributeAccessIssue]
)
from torchtitan.models.common import attention as theirs
from torchtitan.protocols.module import Module

from attnops.adapters.swap import Change
from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import check_kernel, deterministic
from attnops.core.select import key_for
from attnops.ops.attention.varlen import VARLEN as attend, VarlenAttention as Call

OP = "varlen_attention"
DOOR = "--override.imports attnops.adapters.torchtitan.varlen"


class VarlenAttention(theirs.VarlenAttention):  # type: ignore[misc]
    """torchtitan's VarlenAttention, on `attnops.varlen_attention`.

    Two things differ from torchtitan's: queries, keys and values keep their dtype, unless autocast
    is on, where torchtitan makes bfloat16 of them; and the lse that `out_transform` is given has a
    gradient, which torch's varlen attention drops. In torchtitan's batch-invariant mode the calls
    have a deterministic policy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.VarlenAttention.Config):  # type: ignore[misc]
        """kernel: force this kernel on every call; None chooses per call."""

        kernel: str | None = None

    kernel: str | None = None

    def __init__(self, config: Config) -> None:
        # Not theirs, which makes torch's attention FlashAttention-3 or 4 in the whole process, and
        # wants its package.
        Module.__init__(self)
        self.window_size, self.kernel = config.window_size, config.kernel

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: theirs.VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend within each document.

        Args:
            q_BLNH, k_BLNH, v_BLNH: `[B, L, N, H]`, of keys and values with their own heads.
            attention_masks: the documents' cumulative lengths, by which all tokens are covered.
            scale: factor on q.k; default `1 / sqrt(H)`.
            out_transform: called with the output and its lse `[B, L, N]` for what is returned.

        Returns:
            `[B, L, N, Hv]`, in the query's dtype.

        Raises:
            InvalidInput: other masks, as those of flex_attention. UnknownKernel, NoKernel: the
                forced kernel cannot run.
        """
        if not isinstance(attention_masks, theirs.VarlenMetadata):
            fail(InvalidInput, "attention_masks", type(attention_masks).__name__, "VarlenMetadata")
        batch, length = q_BLNH.shape[:2]
        lse_too = out_transform is not None
        packed = tuple(x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        # Its ops know no types of distributed tensors, nor do ours.
        with spmd.no_typecheck():
            out_TNH, lse_TN = self._attend(packed, attention_masks, scale, lse_too)
        _type_as(out_TNH, packed[0])
        out_BLNH: Tensor = out_TNH.unflatten(0, (batch, length)).to(q_BLNH.dtype)
        if out_transform is None:
            return out_BLNH
        _type_as(lse_TN, packed[0], dims=2)
        return out_transform(out_BLNH, lse_TN.unflatten(0, (batch, length)))

    def _attend(
        self,
        packed: tuple[Tensor, ...],
        documents: theirs.VarlenMetadata,
        scale: float | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """(output `[T, N, Hv]`, lse `[T, N]`)."""
        query, key, value = packed
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        left, right = self.window_size
        policy = key_for(OP, self.kernel)
        if is_in_batch_invariant_mode() and not deterministic(policy):
            policy = f"{policy};deterministic".lstrip(";")
        call = Call(
            query,
            key,
            value,
            documents.cu_seq_q,
            documents.cu_seq_k,
            max_seqlen_q=int(documents.max_q),
            max_seqlen_k=int(documents.max_k),
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            causal=right == 0,
            window_left=left,
            window_right=-1 if right == 0 else right,
            return_lse=return_lse,
            padded=False,
            policy=policy,
        )
        output, lse = attend(call)
        return output, lse


def _type_as(given: Tensor, like: Tensor, dims: int = 3) -> None:
    """Give a result the type of the query, where torchtitan checks how tensors are distributed."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        spec = get_partition_spec(like)
        spec = None if spec is None else spmd.PartitionSpec(*(spec[i] for i in range(dims)))
        spmd.assert_type(given, spmd.get_local_type(like), spec)


@override(  # type: ignore[untyped-decorator]
    target=theirs.VarlenAttention.Config,
    exact=True,
    description="attention within documents by the fastest kernel of attnops",
)
def varlen(cfg: Any, kernel: str | None = None) -> Any:
    """The config of our module in place of torchtitan's, for `--override.imports`.

    kernel: force it on every call. Raises UnknownKernel: no kernel has that name.
    """
    if kernel is not None:
        check_kernel(kernel, (OP,))
    return derive(cfg, VarlenAttention.Config, kernel=kernel)


def change(module: nn.Module, kernel: str | None) -> Change | str | None:
    """The change that switches an inner attention of torchtitan's, or why not; None for others."""
    if isinstance(module, theirs.FlexAttention):
        masks = "its masks are functions of flex_attention, which no other kernel takes"
        return f"{masks}; build the model with attn_backend='varlen', which attnops serves"
    if isinstance(module, VarlenAttention):
        return "it calls attnops already"
    if type(module) is not theirs.VarlenAttention:
        return None
    if "forward" in vars(module):
        return f"torchtitan's parallelize() has wrapped it; patch before, or pass {DOOR}"
    return Change(module, VarlenAttention, {"kernel": kernel})
