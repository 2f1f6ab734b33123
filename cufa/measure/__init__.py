"""One benchmark layer for the command line, the recorded measurements and the dashboard.

:mod:`measuring` times contenders in turns or each alone (the two :mod:`regimes`), :mod:`timing` compares times,
:mod:`limits` measures this machine's ceilings, :mod:`peers` wraps other libraries, :mod:`runner` turns a problem and
its contenders into rows, :mod:`suites` names sets of shapes, :mod:`measured` writes rows and reads them back,
:mod:`cards` reads the rows that ship with the package.

FLOP convention (``Problem.flops``): 4 · head_dim per visible score, backward 10 · head_dim. Without a mask that is
4·B·H·Sq·Sk·D. Under a mask the visible scores are counted exactly, whatever tiles a kernel computes.
"""
