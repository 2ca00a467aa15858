"""Bundles and constants that both an operator and its kernels use."""
