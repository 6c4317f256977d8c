"""The routes of the API, one small router for each part."""
