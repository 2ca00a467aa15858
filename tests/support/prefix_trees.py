"""Random trees of prefixes, as block tables of requests."""

from hypothesis import strategies as st


@st.composite
def prefix_trees(draw, *, max_requests=24, max_blocks=12):
    """Draws block tables, which share leading blocks as a tree's leaves do; ids start with 1."""
    next_id = iter(range(1, 10**6))

    def grow(num_requests, prefix, depth):
        if not num_requests:
            return []
        length = draw(st.integers(0, max_blocks // 3))
        table = [*prefix, *(next(next_id) for _ in range(length))]
        if num_requests == 1 or depth == 4:
            # Every request has blocks of its own after what it shares.
            return [
                [*table, *(next(next_id) for _ in range(draw(st.integers(1, 3))))]
                for _ in range(num_requests)
            ]
        first = draw(st.integers(0, num_requests))
        return grow(first, table, depth + 1) + grow(num_requests - first, table, depth + 1)

    tables = grow(draw(st.integers(1, max_requests)), [], 0)
    order = draw(st.permutations(range(len(tables))))
    return [tables[each] for each in order]
