"""The GPU service: token ids in, token ids out."""
