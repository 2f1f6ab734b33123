"""Masks that tests draw."""

from __future__ import annotations

from hypothesis import strategies as st

from cufa.core.mask import CAUSAL, FULL, Band, Mask

_SIDE = st.one_of(st.none(), st.integers(0, 4), st.integers(0, 90))
_DIAGONAL = st.one_of(st.sampled_from(["bottom-right", "top-left"]), st.integers(-90, 90))

#: Any band: bounded on both sides, on one or on none, however its diagonal lies.
BANDS: st.SearchStrategy[Mask] = st.one_of(
    st.sampled_from([FULL, CAUSAL]), st.builds(Band, _SIDE, _SIDE, _DIAGONAL)
)
