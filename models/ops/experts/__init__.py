"""Mixtures of experts: routing, the experts' products, their weights' formats."""
