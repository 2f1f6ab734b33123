"""The CUDA backend: compiled modules, workspaces, tensor maps and launches through CuPy."""
