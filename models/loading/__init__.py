"""Loads a model with its weights from a checkpoint folder."""
