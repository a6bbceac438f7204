"""Several processes: the only room that knows how many ranks there are."""
