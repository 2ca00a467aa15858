"""Kernels over the memory of all ranks."""
