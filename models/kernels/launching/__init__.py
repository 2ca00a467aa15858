"""Builds and launches kernels."""
