"""Functions that a caller wrote together with their derivatives."""
