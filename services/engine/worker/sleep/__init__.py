"""Memory that a sleeping worker gives back: weights and the KV cache."""
