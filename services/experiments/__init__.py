"""Experiments: the loop in one process, sweeps of many runs, recorded data trained again."""
