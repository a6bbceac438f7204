"""The method on exact objectives: iteration, Krylov space, cubic step, acceptance, escape. It imports no torch.nn."""
