"""attnops' own Triton kernels without a GPU: numbers through Triton's interpreter, code through
Triton's compiler."""
