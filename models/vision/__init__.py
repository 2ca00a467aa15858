"""Encoders of images, one file for each family, over shared parts."""
