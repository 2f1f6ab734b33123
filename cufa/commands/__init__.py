"""One file per command of `cufa`. What they measure comes from :mod:`cufa.measure`."""
