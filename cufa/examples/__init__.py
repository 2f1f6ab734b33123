"""Short programs of one idea each, on a CPU, and on a GPU if CuPy is installed: ``python -m cufa.examples.naive``."""
