"""Kernels of attention and of the paged cache."""
