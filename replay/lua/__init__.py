"""The scripts that Redis runs, read by replay/connection.py."""
