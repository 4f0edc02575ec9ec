"""Parts that another package adds to irkit: a head, an index kind, a loss and a model family."""
