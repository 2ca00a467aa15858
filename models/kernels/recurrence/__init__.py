"""Kernels of layers with a recurrent state."""
