"""The run of a minimiser: the loop, the endings, and the checks of points and steps."""
