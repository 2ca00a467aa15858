"""One file per operation: registration, shape function and PyTorch reference."""
