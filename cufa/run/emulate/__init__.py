"""The executor: every thread of every block of a kernel, run on a CPU from the .cu file."""
