"""Decoders that run as transformers' modules, with our attention and our cache."""
