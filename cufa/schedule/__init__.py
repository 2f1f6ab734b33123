"""Decoding: how the keys of long caches are shared out over thread blocks, and merged.

:mod:`cufa.schedule.decode` says who reads what, :mod:`cufa.plan.decode_splits` how many parts there are,
:mod:`cufa.plan.decode` which kernel does it.

Words, which have one meaning each here and in ``cuda_src/decode``:

item
    What one result comes from: the packed query rows (query heads of a group times query tokens, one block of them) of
    one key/value head of one sequence.
tile
    ``block_kv`` keys of a sequence, counted from its first key.
split
    One of a fixed number of runs of tiles that every sequence is cut into (schedule "fixed").
share
    One of a number of runs, nearly equally long, that the tiles of all items, laid end to end, are cut into (schedule
    "balanced"). It may begin in one item and end in another.
piece
    The tiles of one item that one thread block reads: a split, or what a share has of that item.
part
    What comes of a piece before it is merged: O, not yet divided, and the m and l of each row.
slot
    Where a part lies in the workspace until it is merged.
"""
