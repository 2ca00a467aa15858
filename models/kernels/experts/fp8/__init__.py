"""Experts in FP8, with activations rounded to FP8."""
