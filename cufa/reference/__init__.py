"""The semantics of every operation in float64 NumPy: results are compared with these functions."""
