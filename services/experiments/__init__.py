"""Experiments on one process: the loop without servers."""
