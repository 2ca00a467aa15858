"""Operators of layers that keep a state of each request, with their PyTorch references."""
