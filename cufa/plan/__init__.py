"""From a problem to a plan: kernel, tiles, splits and launches. Pure Python, without a GPU."""
