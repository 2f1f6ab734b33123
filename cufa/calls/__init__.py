"""The public calls: read and check arguments, state the problem, and run its plan where the arrays are."""
