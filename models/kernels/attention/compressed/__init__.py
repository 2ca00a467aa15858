"""Kernels of attention to recent and compressed keys."""
