"""What a GPU is: architectures, their limits, and how many blocks an SM holds."""
