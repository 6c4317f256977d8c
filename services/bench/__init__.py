"""Benches: a figure and its baseline, measured in one run. `leeway bench --help` lists them."""
