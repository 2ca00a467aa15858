"""Families of image processors: sizes, order of patches and placeholder tokens."""
