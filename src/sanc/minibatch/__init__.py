"""The iteration on samples: one Krylov space serves many steps, and the next batch judges the last ones."""
