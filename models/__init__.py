"""Everything that runs inside a forward pass."""
