"""Triton kernels for CUDA; imported only where Triton is installed and tensors are on a GPU."""
