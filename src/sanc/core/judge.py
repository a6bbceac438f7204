"""The former place of the ratio test and of the rules for σ."""

raise ImportError(
    "sanc.core.judge no longer exists: import SigmaUpdate from sanc, and SigmaRule (its Judge), Verdict, classify and "
    "ratio from sanc.extend."
)
