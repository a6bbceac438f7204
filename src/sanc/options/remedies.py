"""Options of earlier versions and of other optimisers, and what to pass instead: the ends of error messages."""

from __future__ import annotations

REPLACED_OPTIONS = {
    "renew": "refresh, of the metric",
    "resolves": "max_resolves",
    "step_scale": "step_size",
    "reorthogonalise": 'krylov_stop: "forcing" reorthogonalises',
    "estimate_constants": "escape: sanc.CheckedEscape() estimates them, sanc.PaperEscape(L1=…, L2=…) does not",
    "escape_check": "escape: sanc.CheckedEscape() checks its step, sanc.PaperEscape() does not",
    "sign": "escape: sanc.CheckedEscape() steps downhill, sanc.PaperEscape() chooses the sign at random",
    "curvature_guard": "escape, and sanc.lab.authors.AuthorsEscape() has it",
    "otherwise": "escape, and sanc.lab.authors.AuthorsEscape() has it",
    "gradient_tolerance_power": "escape, and sanc.lab.authors.AuthorsEscape() has it",
    "fallback_sample": "escape, and sanc.lab.authors.AuthorsEscape() has it",
}
"""Options of earlier versions, and the replacement of each."""

_REMEDY_OF_LIMITS = (
    "an optimiser makes one iteration in each step(), so call it as often, or use sanc.minimize, which has max_iter"
)
_REMEDY_OF_ADAM = (
    "leave it out, since the metric and the average of the method replace those of Adam and SGD (help(sanc.Minibatch))"
)
_REMEDY_OF_LBFGS = "leave it out, since a ratio test replaces the line search of L-BFGS (help(sanc.RatioTest))"
FOREIGN_OPTIONS = {
    **dict.fromkeys(
        ("max_iter", "max_steps", "niter", "n_iter", "num_iters", "epochs", "steps", "max_eval"), _REMEDY_OF_LIMITS
    ),
    **dict.fromkeys(
        ("betas", "beta1", "beta2", "eps", "amsgrad", "nesterov", "dampening", "alpha", "centered"), _REMEDY_OF_ADAM
    ),
    **dict.fromkeys(("line_search_fn", "history_size", "tolerance_grad", "tolerance_change"), _REMEDY_OF_LBFGS),
    **dict.fromkeys(
        ("foreach", "fused"),
        "leave it out, since all vectors are flat already; on a GPU capture=True replays recorded steps",
    ),
    "differentiable": "leave it out, since a step is not differentiated; sanc.argmin differentiates a minimum",
    "capturable": "pass capture=True",
    "maximize": "leave it out, and return the negative of the objective from the closure",
    "batch_size": "the closure has the batch, so set its size in the DataLoader, or in sanc.ThreeSamples",
    "learning_rate": "leave it out, since the method determines the step size, and lr = 1.0 is a factor on it",
    "lr_scheduler": "leave it out, since no schedule is needed, and those of torch can be attached to the optimiser",
    "warmup_steps": "pass warm_up",
    **dict.fromkeys(
        ("total_steps", "num_training_steps", "t_max"),
        "leave it out, since no schedule is needed, or pass horizon, the number of steps over which step sizes decay",
    ),
    "decay": "pass weight_decay",
    "device": "leave it out, since the optimiser works on the device of the parameters",
    **dict.fromkeys(("verbose", "disp"), "leave it out, and print opt.record after a step"),
    **dict.fromkeys(("grad", "gradient"), "pass the gradient as jac"),
    "tol": "leave it out, since an optimiser does not stop by itself; opt.record.grad_norm has the gradient norm",
    "closure": "pass it to step()",
    "method": "pass a sanc.Method as preset; for a member of the family use its class, such as sanc.ARC",
}
"""Options of other optimisers and minimisers, and what to do instead."""
FOREIGN_TO_MINIMIZE = {
    **dict.fromkeys(("max_steps", "niter", "n_iter", "num_iters", "epochs", "steps"), "pass max_iter"),
    "dtype": "leave it out, since the run has the type of x0",
    **dict.fromkeys(("n_starts", "starts"), "call sanc.minimize_many, which has starts"),
    **dict.fromkeys(("ftol", "xtol"), "pass tol, the tolerance on the gradient norm"),
    "max_eval": "pass max_nfev",
    "verbose": "pass disp=True",
    "learning_rate": "leave it out, since the method determines the step size",
    "confidence": "leave it out, since the certificate of a run holds with probability 0.99; sanc.certificate has it",
    "eps": "leave it out, since differences choose their own steps",
    "device": "leave it out, since the run is on the device of x0",
    "maximize": "leave it out, and minimise the negative of the objective",
}
"""The same for `minimize`, where the answer differs."""
