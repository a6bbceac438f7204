"""Bounds: the box, the face of free variables, and steps in the box."""
