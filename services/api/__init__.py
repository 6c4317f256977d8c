"""REST over a run: models, metrics, the application."""
