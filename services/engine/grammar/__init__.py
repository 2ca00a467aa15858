"""Grammars that an output must follow: compiled, checked for cost, and walked token by token."""
