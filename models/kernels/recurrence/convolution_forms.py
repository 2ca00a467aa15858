"""Chooses how many tokens a program of causal_conv takes, on the host."""

MOST_FEW = 16
"""Query tokens up to which one program has all tokens of a request."""


def tokens_of_a_program(most_queries: int) -> int:
    """Returns the tokens of a program: all of a request, or a tile of those of one with more.

    most_queries: query tokens of the request with the most.
    """
    return min(MOST_FEW, 1 << (max(1, most_queries) - 1).bit_length())


def first_queries_of_each_form() -> list[int]:
    """Returns the smallest most_queries that takes each kernel, rising; warm-up runs these."""
    forms = {tokens_of_a_program(queries): queries for queries in range(MOST_FEW, 0, -1)}
    return [*sorted(forms.values()), MOST_FEW + 1]
