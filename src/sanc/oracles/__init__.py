"""Who answers f, g and Hv: autograd, closed forms, NumPy callables."""
