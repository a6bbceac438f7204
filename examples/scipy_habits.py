"""`sanc.minimize` for those who know `scipy.optimize.minimize`.

python examples/scipy_habits.py
"""

import numpy as np
from scipy.optimize import OptimizeResult, minimize, rosen, rosen_der, rosen_hess_prod

import sanc

x0 = np.array([1.3, 0.7, 0.8, 1.9, 1.2])

print("with gradient and Hessian products:")
print(sanc.minimize(rosen, x0, jac=rosen_der, hessp=rosen_hess_prod, options={"maxiter": 100, "gtol": 1e-8}))

print("\nvalues only, differences by SciPy's names:")
for scheme in ("2-point", "3-point"):
    result = sanc.minimize(rosen, x0, jac=scheme)
    print(f"  {scheme}: error {np.abs(result.x - 1).max():.1e}, {result.nfev} values")

print("\nas a method of SciPy:")
result = minimize(rosen, x0, jac=rosen_der, method=sanc.scipy_method, options={"method": "arc"})
print(f"  {result.message} {result.nit} iterations")

print("\nstopped after five iterations, and resumed:")
states = []


def keep(intermediate_result: OptimizeResult) -> None:
    """Append the state after an iteration to a list."""
    states.append(intermediate_result.state)


sanc.minimize(rosen, x0, jac=rosen_der, max_iter=5, callback=keep)
print(" ", sanc.minimize(rosen, x0, jac=rosen_der, resume=states[-1]).nit, "iterations in all")
