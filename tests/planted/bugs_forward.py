"""Planted bugs of the softmax, of FA3 where the producer lists tiles, and of decoding (planted_runs.of)."""

from __future__ import annotations

from functools import partial

from planted_runs import appending, below_zero, forward, listing, merging, of, paged, steep, steep_decoding

from cufa.problem.mask import Band

CAUSAL_FA2 = partial(forward, "fa2", "float16", None, 64, mask=Band(right=0), lengths=(140, 300))
MASKED, RAGGED = partial(listing, shown="documents both ways"), partial(listing, shown="packed")

#: A running maximum that differs between lanes, or grows further than float16 holds.
SLACK = "24 bits of slack, where float16 ends at 65,504", "int SLACK = 8", "int SLACK = 24", "wrong"
VOTES = "if (!warp_any(grown)) return false;\n#pragma unroll\n    for (int r = 0; r < ROWS; ++r) m_lane"

# fmt: off
SOFTMAX = [
    *of(steep_decoding, "decode/tile.cuh",
        (SLACK[0], "INVARIANT ? 0 : 8", "INVARIANT ? 0 : 24", "wrong", {"kernel": "decode_split_tma"}),
    ),
    *of(below_zero, "forward/fa3/integer_maxima.cuh",
        ("maxima below zero taken for integers that grow", " || softmax.m_scaled[r] < -SLACK", "", "wrong"),
    ),
    *(bug for algorithm in ("fa2", "fa3") for bug in of(partial(steep, algorithm), "shared/softmax.cuh",
        (*SLACK, {"scale": 0.5}),
        ("maxima of lanes for those of rows", "m_lane[r] = quad_max(m_lane[r]);", ";", "wrong"),
        ("the maximum of the last row alone", "grown |= m_lane[r]", "grown = m_lane[r]", "wrong"),
        ("a maximum that one lane raises alone", VOTES, VOTES.replace("warp_any(grown)", "grown"), "divergence"),
    )),
]

FA2_FORWARD = [
    *of(CAUSAL_FA2, "shared/softmax.cuh",
        ("lanes 16 to 31 without a shuffle", "x = fmaxf(x, shfl_xor(x, 1));\n  return fmaxf",
         "if (threadIdx.x % 32 < 16) x = fmaxf(x, shfl_xor(x, 1));\n  return fmaxf", "divergence"),
    ),
    *of(CAUSAL_FA2, "mma/copy.cuh",
        ("a row too many is read", "row + i * STEP < valid_rows", "row + i * STEP <= valid_rows", "out-of-range"),
    ),
]

FA3_LISTS = [
    *of(MASKED, "forward/fa3/lister.cuh",
        ("the list is read before it is written", "    list.wait_full();\n", "", "divergence never-written race"),
        ("an entry is overwritten while it is read",
         "    list.wait_empty();\n    write_shared(smem.list + 16 * list.stage, entry",
         "    write_shared(smem.list + 16 * list.stage, entry", "wrong"),
        ("entries are not given back", "    list.release(lane);\n", "", "divergence"),
        ("an entry without an end", "if (last) st_shared_u32(marks, ld_shared_u32(marks) | LAST_TILE);", "",
         "divergence"),
        ("lanes read an item that is not there yet", "      warp_sync();  // all lanes read it\n", "", "race"),
        ("consumers get no tile number", "      write_shared(smem.tile(K_ring.stage), entry.tile);\n", "",
         "divergence never-written"),
        ("a tile number is stored while consumers read", "      K_ring.wait_empty(inside, entry.tile.tile);\n", "",
         "barrier"),
        ("blocks that see nothing see the first keys",
         "if (tile.stands_for_none()) return {tile, LENGTHS_KIND == PACKED ? p.total_k : p.seqlen_k, Bc};", "",
         "wrong", {"shown": "nothing visible"}),
    ),
    *of(MASKED, "forward/fa3/memory.cuh",
        ("entries are given back by one loader for both", "list_ring().init(1, 2);", "list_ring().init(1, 1);",
         "divergence"),
        ("records of items are too few", "LISTED ? 4 + LIST_STAGES : 4", "LISTED ? 2 : 4",
         "copy-not-awaited out-of-range race wrong"),
    ),
    *of(MASKED, "forward/fa3/tiles.cuh",
        ("a tile's buffer is given back while lanes read",
         "    warp_sync();  // all lanes have read the tile's descriptor before one of them gives the buffer back\n",
         "", "race", {"shown": "one consumer"}),
        ("a consumer that sees nothing waits for more", "return listed.seen(consumer.consumer) || listed.last();",
         "return listed.seen(consumer.consumer);", "divergence", {"shown": "two runs of heads"}),
    ),
    *of(MASKED, "forward/fa3/tile_list.cuh",
        ("rows of another consumer", "top() + lane_id() *", "top() + (lane_id() ^ 1) *", "wrong"),
        ("a consumer's tile is called clear", "(is.every ? SEEN | CLEAR_TILE : SEEN) << 2",
         "(SEEN | CLEAR_TILE) << 2", "wrong"),
        ("the second consumer is forgotten", "      marks |= shfl_xor(marks, 1);\n", "", "wrong"),
    ),
    *of(MASKED, "forward/irregular_scores.cuh",
        ("runs that hide a warp's last rows are passed over", "row + 8 >= x.least_lo", "row >= x.least_lo", "wrong"),
    ),
    *of(MASKED, "forward/fa3/persistent_items.cuh",
        ("an item left out", "index = gridDim.x + shfl", "index = gridDim.x + 1 + shfl", "wrong",
         {"shown": "next launch"}),
        ("the next launch begins with the last item", "if (taken == total - 1) atomic_add",
         "if (taken == total) atomic_add", "counters", {"shown": "next launch"}),
        ("the order of another block", "p.block_order + rest / members", "p.block_order + rest % members",
         "divergence out-of-range", {"shown": "half of all scores"}),
    ),
    *of(MASKED, "forward/fa3/consumer_items.cuh",
        ("runs of another item", "hide<Tag::value>(fragment_view(S_rmem), p, descriptor,",
         "hide<Tag::value>(fragment_view(S_rmem), p, smem.item(0),", "race wrong", {"shown": "two runs of heads"}),
    ),
    *of(MASKED, "forward/fa3/consumer.cuh",
        ("rows behind a sequence are no zeros", "        if (!exists) {  // rows past the end may hold NaN\n",
         "        if (false) {\n", "wrong", {"shown": "padded"}),
    ),
    *of(MASKED, "forward/fa3/kernel.cu",
        ("values in front of a tile that is not seen count again", "P_rmem[i] = 0;", "{}", "wrong",
         {"shown": "gaps"}),
        ("a tile that is not seen is not given back",
         "    K_ring.release(lane);\n    K_ring.advance();\n    begin_slot();\n",
         "    K_ring.advance();\n    begin_slot();\n", "divergence", {"shown": "gaps"}),
    ),
    *of(RAGGED, "forward/fa3/lister.cuh",
        ("the tail of V is not cleared", "        clear_rows<Bc, V_DIM>(tile, entry.existing, lane);\n", "",
         "wrong"),
        ("the tail of V but for a row", "clear_rows<Bc, V_DIM>(tile, entry.existing, lane);",
         "clear_rows<Bc, V_DIM>(tile, entry.existing + 1, lane);", "wrong"),
        ("a key too many is cleared", "clear_rows<Bc, V_DIM>(tile, entry.existing, lane);",
         "clear_rows<Bc, V_DIM>(tile, entry.existing - 1, lane);", "wrong"),
        ("zeros without a fence", "        async_proxy_fence();\n", "", "proxy-fence"),
        ("zeros that not all lanes have written",
         "      warp_sync();  // all lanes have read the list, and written their zeros\n", "", "race"),
        ("zeros in a tile that has not landed", "        mbarrier_wait(smem.tail_full, tail_parity);\n", "",
         "barrier copy-not-awaited race"),
        ("the first phase of the tail for all", "        tail_parity ^= 1;\n", "", "barrier copy-not-awaited race"),
        ("keys of the sequence before", "first_key_of(descriptor) + row", "row", "wrong"),
        ("rows of the sequence before", "row += int(read_sequence(reader.descriptor()).first_row());", "", "wrong"),
    ),
    *of(RAGGED, "forward/fa3/consumer.cuh",
        ("rows behind a sequence are written", "row < sequence.stored_rows();", "true;",
         "out-of-range race wrong"),
    ),
    *of(RAGGED, "forward/fa3/consumer_items.cuh",
        ("the mask of another item", "hide<Tag::value>(fragment_view(S_rmem), p, descriptor,",
         "hide<Tag::value>(fragment_view(S_rmem), p, smem.item(0),", "wrong"),
    ),
]

DECODE_MERGE = [
    *of(merging, "decode/merge.cuh",
        ("the wait for all blocks to begin", "if constexpr (CLUSTER_MERGE) cluster_wait();", "", "block-not-running"),
    ),
    *of(merging, "decode/cluster.cuh",
        ("the fence after mbarrier.init", "mbarrier_init_fence();", "", "race"),
        ("the wait for what is received", "mbarrier_wait_cluster(barrier, 0);", "",
         "block-not-running copy-not-awaited never-written"),
        ("that it is for other blocks", "mbarrier_wait_cluster(barrier", "mbarrier_wait(barrier", "race"),
        ("the arrival", "cluster_arrive_relaxed();", "", "barrier"),
        ("all bytes", "expect_tx(barrier, splits * (", "expect_tx(barrier, splits * (-16 + ",
         "copy-not-awaited deadlock"),
    ),
]

TMA = "decode_split_tma"
DECODE_PAGES = [
    *of(partial(paged, TMA), "decode/tma.cuh",
        ("the second 32 tiles take the pages of the first", "      pages = next_pages;\n", "", "wrong"),
        ("the third 32 tiles take the pages of the second", "pages = next_pages;\n      next_pages = page_of(",
         "pages = next_pages;\n      page_of(", "wrong"),
        ("pages are replaced a tile early", "++index == 32", "++index == 31", "wrong"),
        ("a new token goes to the page of the next position", "page_of(p, position);", "page_of(p, position + 1);",
         "wrong"),
    ),
    *of(partial(paged, "decode_split"), "decode/stream.cuh",
        ("a page's last row is taken from the next page", "table + mine / p.page_size",
         "table + (mine + 1) / p.page_size", "out-of-range wrong"),
    ),
]

DECODE_APPEND = [
    *(bug for kernel in (TMA, "decode_balanced_tma", "decode_split", "decode_balanced")
      for bug in of(partial(appending, kernel), "decode/stream.cuh",
        ("every block stores new tokens", "store_new = span.row_block == 0;", "store_new = true;", "race"),
    )),
    *of(partial(appending, TMA), "decode/tma.cuh",
        ("a box read while another block stores its rows", "st_shared_vec4(target, hidden ? vec4{0, 0, 0, 0} : k);",
         "if (store_new) st_shared_vec4(target, hidden ? vec4{0, 0, 0, 0} : k);", "race"),
    ),
]
