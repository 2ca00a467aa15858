"""Compiles a model at one of four levels and keeps what it compiled."""
