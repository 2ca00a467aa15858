"""Tiles of kernels by size, in one file a GPU; nothing is tuned while serving."""
