"""The CPU path: NumPy follows the kernels' schedules on larger tiles."""
