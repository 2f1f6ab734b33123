"""Decoding: a few query tokens against a long key/value cache.

The way of a call is that of ``flash_attention``: arrays → :mod:`api` →
:class:`~cufa.decode.problem.DecodeProblem` → :func:`~cufa.decode.plan.make_decode_plan` → backend.
:mod:`schedule` says who reads what.
"""
