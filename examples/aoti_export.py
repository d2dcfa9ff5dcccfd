"""Export a model with AOTInductor: one file with the chosen kernels, which another process loads
and runs without the model's code.

python examples/aoti_export.py              a temporary file
python examples/aoti_export.py model.pt2    a file that stays
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from attnops.nn import SelfAttention

LOAD = """
import sys, torch, attnops  # the kernels that the file calls by name are ops of attnops
package, given, found = sys.argv[1:]
with torch.no_grad():
    torch.save(torch._inductor.aoti_load_package(package)(torch.load(given)), found)
"""


def export(model: nn.Module, given: Tensor, path: str) -> None:
    """Write the package of a model to a file `.pt2`."""
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            torch.export.export(model, (given,)), package_path=path
        )


def run_elsewhere(path: str, given: Tensor) -> Tensor:
    """The package's result in another process."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/given.pt", f"{folder}/found.pt"
        torch.save(given, source)
        subprocess.run([sys.executable, "-c", LOAD, path, source, target], check=True)
        return torch.load(target)


def main(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SelfAttention(64, 4, 2, softcap=30.0), SelfAttention(64, 4, 2)).eval()
    given = torch.randn(2, 12, 64)
    export(model, given, path)
    with zipfile.ZipFile(path) as archive:
        code = "".join(
            archive.read(name).decode(errors="ignore")
            for name in archive.namelist()
            if name.endswith((".json", ".cpp"))
        )
    # The kernel of the soft cap is called by its name. That of the plain layer is lowered in place,
    # to torch's own call.
    assert "attnops::attention.reference" in code and "attnops::attention.sdpa" not in code
    assert "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu" in code
    print(
        "in the file: attnops::attention.reference, called by name, and attention.sdpa, lowered "
        "in place"
    )
    with torch.no_grad():
        torch.testing.assert_close(run_elsewhere(path, given), model(given))
    print("another process gives what the model gives")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else str(Path(folder, "model.pt2")))
