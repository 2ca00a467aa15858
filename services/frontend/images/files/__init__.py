"""Image files: which are read, checked before they are decoded, and decoded."""
