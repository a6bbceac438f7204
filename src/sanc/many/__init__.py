"""Many independent problems at once: the rules of `minimize`, for all rows of a batch together."""
