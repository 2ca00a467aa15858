"""Arithmetic that kernels of several packages have in common."""
