"""Decoding: how the keys of long caches are shared out over thread blocks, and merged.

:mod:`schedule` says who reads what, :mod:`splits` how many parts there are, :mod:`choose` which kernel does it.
"""
