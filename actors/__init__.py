"""The acting side: policies, environments, and the workers that roll out groups."""
