"""`flashinfer_mla_fa3`: FlashInfer's attention over latents with the warp groups of SM90, planned by the host. See `flashinfer_mla_fa2`."""

from __future__ import annotations

from attnops.kernel import arch
from attnops.kernels.flashinfer.mla import declare
from attnops.kernels.flashinfer.modules import FA3
from attnops.measured import Roofline, phases

COST_US = phases(Roofline(17.1, 1.2, 0.89, 0.0012, 31_000), Roofline(7.4, 0.54, 0.83, 0.07, 230))


declare(FA3, arch(90), COST_US, "FlashInfer: MLA on SM90, planned by the host")
