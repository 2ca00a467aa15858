"""The engine itself: submit, abort, the step loop, drain."""
