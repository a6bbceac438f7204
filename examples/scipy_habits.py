"""`sanc.minimize` for those who know `scipy.optimize.minimize`.

python examples/scipy_habits.py
"""

import numpy as np
from scipy.optimize import OptimizeResult, minimize, rosen, rosen_der, rosen_hess_prod

import sanc


def main() -> None:
    """Call it in the ways in which SciPy is called."""
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

    print("\na nested point, with its gradient:")

    def fun(p: dict[str, np.ndarray]) -> float:
        return rosen(np.append(p["head"], p["tail"]))

    def jac(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        g = rosen_der(np.append(p["head"], p["tail"]))
        return {"head": g[:2], "tail": g[2:]}

    print(" ", sanc.minimize(fun, {"head": x0[:2], "tail": x0[2:]}, jac=jac).x)

    print("\nstopped after five iterations, and resumed:")
    states = []

    def keep(intermediate_result: OptimizeResult) -> None:
        states.append(intermediate_result.state)

    sanc.minimize(rosen, x0, jac=rosen_der, max_iter=5, callback=keep)
    print(" ", sanc.minimize(rosen, x0, jac=rosen_der, resume=states[-1]).nit, "iterations in all")


if __name__ == "__main__":
    main()
