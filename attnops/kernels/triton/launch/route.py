"""The launch of the routing of a mixture. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnops.core.kernel import deterministic
from attnops.kernels.shared.launch.gpu import flat, launch, overlapped, overlaps, steady
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device.route import route as device
from attnops.ops.experts.route_reference import by_logits

if TYPE_CHECKING:
    from attnops.ops.experts.route import Route


def route(call: Route) -> None:
    """One launch. A token's program knows nothing of the others, so that its bits do not follow the
    batch."""
    logits = steady(call.logits) if deterministic(call.policy) else call.logits
    weights, index = call.weights, call.index
    (tokens, count), top_k = logits.shape, index.shape[1]
    if tokens == 0:
        return
    group, plain = count // call.groups, by_logits(call, call.bias)
    softmax, cancels = call.scoring == "softmax", call.normalize and not call.eps
    launch(
        device,
        (tokens,),
        {
            "GROUPS": call.groups,
            "GROUP": group,
            "GROUPS_P": power(call.groups),
            "GROUP_P": power(group),
            "TOP_GROUPS": call.top_groups,
            "BEST": call.group_best,
            "K": top_k,
            "KP": power(top_k),
            "SOFTMAX": softmax,
            "BY_LOGITS": plain,
            "NORMALIZE": call.normalize,
            "WHOLE": softmax and not (plain and cancels),
            "CANCELS": cancels,
            **overlapped(overlaps(logits.device)),
        },
        (
            logits,
            flat(call.bias),
            weights,
            index,
            call.eps,
            call.scale,
            *logits.stride(),
            *weights.stride(),
            *index.stride(),
        ),
        warps=1,
    )
