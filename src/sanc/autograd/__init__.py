"""Losses of torch: closures over leaf tensors, differentiated automatically."""
