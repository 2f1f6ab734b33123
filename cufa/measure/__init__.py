"""One benchmark layer for the command line, the recorded measurements and the dashboard.

:mod:`measuring` times contenders in turns or each alone (the two :mod:`regimes`), :mod:`timing` compares times,
:mod:`limits` measures this machine's ceilings, :mod:`peers` wraps other libraries, :mod:`runner` turns a problem and
its contenders into rows, :mod:`suites` names sets of shapes, :mod:`measured` writes rows and reads them back,
:mod:`cards` reads the rows that ship with the package.

FLOP convention: forward 4 · head_dim per visible score (``Problem.flops``): 4·B·H·Sq·Sk·D without a mask, and
under a mask the exact count of scores that it lets through, never the work that an algorithm happens to do.
"""
