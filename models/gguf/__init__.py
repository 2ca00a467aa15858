"""GGUF files: their metadata as a checkpoint's JSON files, and offsets of tensors. No torch."""
