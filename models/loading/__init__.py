"""From a checkpoint folder to a model with its weights."""
