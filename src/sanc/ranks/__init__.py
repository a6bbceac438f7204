"""Several processes: the only subpackage that depends on the number of ranks."""
