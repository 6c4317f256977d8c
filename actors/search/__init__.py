"""The search environment: protocol, rendering, retrieval, rewards, datasets."""
