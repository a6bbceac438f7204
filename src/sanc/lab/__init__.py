"""Things to run rather than to import: the demonstration. They need the extra ``sanc[lab]``."""
