"""Entry points of the processes of a run: train (the parent), serve, learn, warmstart."""
