"""Kernels that turn logits into tokens."""
