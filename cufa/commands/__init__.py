"""One file per command of `cufa`. They measure by :mod:`cufa.measure`."""
