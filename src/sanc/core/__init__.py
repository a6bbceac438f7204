"""The method itself: one iteration, its Krylov space, cubic step, judge and escape. It knows no torch.nn."""
