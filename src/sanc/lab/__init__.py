"""The laboratory: the data, runs, figures and reports of the paper's experiments. It needs the extra ``sanc[lab]``."""
