"""`flashinfer_mla_fa2`: FlashInfer's attention over latents for SM80 and later (https://arxiv.org/abs/2501.01005), planned by the host.

Two names for FlashInfer's two kernels, so that the choice between them, and between them and FlashMLA, is selection's and can be
measured, forced and read in the generated code like any other.
"""

from __future__ import annotations

from attnops.kernel import arch
from attnops.kernels.flashinfer.mla import declare
from attnops.kernels.flashinfer.modules import FA2
from attnops.measured import Roofline, phases

COST_US = phases(Roofline(18.4, 0.61, 0.41, 0.0032, 8300), Roofline(8.0, 0.44, 0.35, 0.085, 240))


declare(FA2, arch(80, 86, 87, 89, 90, 100, 103, 120, 121), COST_US, "FlashInfer: MLA of SM80 and later, planned by the host")
