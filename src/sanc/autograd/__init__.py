"""Oracles of torch losses: closures over leaf tensors, with derivatives by automatic differentiation."""
