"""Krylov spaces: the Lanczos process, the cubic model in them, and bounds on eigenvalues."""
