"""One benchmark layer for the command line, the recorded measurements and the dashboard.

:mod:`timing` times functions side by side, :mod:`sustained` each alone with the power it draws (the two
:mod:`regimes`), :mod:`limits` measures what this machine can do at best, :mod:`peers` wraps other libraries,
:mod:`runner` turns a problem and a list of contenders into rows, :mod:`suites` names sets of shapes,
:mod:`measured` writes rows and reads them back, :mod:`cards` reads those that ship with the package.

FLOP convention: forward 4 · head_dim per visible score (``Problem.flops``): 4·B·H·Sq·Sk·D without a mask, and
under a mask the exact count of scores that it lets through, never the work that an algorithm happens to do.
"""
