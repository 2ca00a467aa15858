"""Triton kernels for CUDA; imported only where Triton is installed and tensors lie on a GPU."""
