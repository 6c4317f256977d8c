"""Objectives: ratio, clip, ctn, advantage and reduce as small pure functions; presets as data."""
