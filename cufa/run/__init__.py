"""Plans carried out: on a GPU (cuda), by NumPy (cpu), and by executing the kernels' source on a CPU (emulate)."""
