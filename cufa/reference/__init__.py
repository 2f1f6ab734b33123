"""The semantics of every operation in float64 NumPy: what results are compared with."""
