"""Which tiles each thread block visits, and in what order.

Decoding: :mod:`cufa.schedule.decode` says which block reads which keys, :mod:`cufa.plan.decode_splits` into how many
splits or shares the work is cut, :mod:`cufa.plan.decode` which kernel runs. Words, here and in ``cuda_src/decode``:

work item
    A block of query rows of one key/value head of one sequence. The head has one row per query head of its query group
    and token.
tile
    ``block_kv`` keys of a sequence, counted from its first key.
split
    One of a fixed number of runs of tiles that every sequence is cut into (schedule "fixed").
share
    One of the runs into which the concatenated tiles of all work items are cut (schedule "balanced"). A share may begin
    in one work item and end in another.
span
    The tiles of one work item that one thread block reads: a split, or a share's tiles of that work item.
partial result
    The result of a span before the merge: O, not yet divided by l, and m and l of each row.
slot
    The place of a partial result in the workspace.
"""
