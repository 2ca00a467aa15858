"""Kernels of attention to blocks of keys that an index chooses."""
