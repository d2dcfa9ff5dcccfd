"""The Triton kernels behind `attnops.kernels.triton`. `plan` is plain Python; every other module here imports triton."""
