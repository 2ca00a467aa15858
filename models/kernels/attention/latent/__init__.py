"""Attention to latent vectors, and the indexer that chooses among them."""
