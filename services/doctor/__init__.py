"""`leeway doctor`: what is wrong with a machine or a run, and what to do."""
