"""Metrics M that are learnt from gradients, one file each, behind the protocol in `base`."""
