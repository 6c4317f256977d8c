"""`leeway eval`: benchmarks played, scored, and compared."""
