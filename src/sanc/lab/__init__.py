"""The laboratory: data, runs, figures and reports of the paper's experiments. It needs the extra ``sanc[lab]``."""
