"""Kernels of norms, gates and scattered writes."""
