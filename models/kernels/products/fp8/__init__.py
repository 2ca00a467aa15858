"""Products with FP8 weights and rounded activations."""
