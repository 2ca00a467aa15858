"""Compiler passes: put the operators of a traced graph together before it is split."""
