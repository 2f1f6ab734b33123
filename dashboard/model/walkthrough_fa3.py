"""FA3's pipeline as a timeline: the producer's copies, the stages of both rings, and two consumers in ping-pong.

The order follows ``cuda_src/forward/fa3``. The lengths are assumed: a copy, a product S = Q Kᵀ and a product P V take
one unit, a softmax takes two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

TILES, CONSUMERS = 5, 2
_SOFTMAX = 2
PRODUCER = "Producer"


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that takes place in a row of the timeline from ``start`` to ``end``, in units."""

    row: str
    name: str
    """"K", "V", "Q", "S", "P V" or "softmax"."""
    tile: int
    """In the order of visits; -1: Q."""
    start: int
    end: int


def label(event: Event) -> str:
    return event.name if event.tile < 0 else f"{event.name.replace(' ', '')} {event.tile}"


def products(consumer: int) -> str:
    return f"Consumer {consumer + 1}: products"


def softmax(consumer: int) -> str:
    return f"Consumer {consumer + 1}: softmax"


def stage(ring: str, number: int) -> str:
    return f"{ring} ring, stage {number}"


def pipeline(stages: int, consumers: int = CONSUMERS) -> list[Event]:
    """All events. Each K or V tile stays in its stage until all consumers have read it."""
    events: list[Event] = []
    read: dict[tuple[str, int], int] = {}  # by ring and tile: when all consumers have read it
    copied = tensor_cores = 0
    ready = [0] * consumers

    def copy(ring: str, tile: int) -> int:
        nonlocal copied
        start = max(copied, read.get((ring, tile - stages), 0))
        copied = start + 1
        events.append(Event(PRODUCER, ring, tile, start, copied))
        return copied

    def multiply(consumer: int, name: str, ring: str, tile: int, landed: int) -> int:
        nonlocal tensor_cores
        start = max(tensor_cores, ready[consumer], landed)
        tensor_cores = start + 1
        events.append(Event(products(consumer), name, tile, start, tensor_cores))
        read[ring, tile] = tensor_cores
        return tensor_cores

    for slot in range(TILES + 1):  # S of this tile and P V of the tile before
        K = copy("K", slot) if slot < TILES else 0
        Q = copy("Q", -1) if slot == 0 else 0
        V = copy("V", slot - 1) if slot else 0
        for consumer in range(consumers):
            scored = multiply(consumer, "S", "K", slot, max(K, Q)) if slot < TILES else 0
            added = multiply(consumer, "P V", "V", slot - 1, V) if slot else 0
            ready[consumer] = added
            if scored:
                ready[consumer] = max(added, scored + _SOFTMAX)
                events.append(Event(softmax(consumer), "softmax", slot, scored, scored + _SOFTMAX))
    held = [e for e in events if e.row == PRODUCER and e.tile >= 0]
    return events + [
        Event(stage(e.name, e.tile % stages), e.name, e.tile, e.start, read[e.name, e.tile]) for e in held
    ]


def rows(stages: int) -> list[str]:
    """Names of the rows, from top to bottom."""
    rings = [stage(ring, n) for ring in "KV" for n in range(stages)]
    return [PRODUCER, *rings, *(name(n) for n in range(CONSUMERS) for name in (products, softmax))]


def busy(events: Sequence[Event]) -> tuple[int, int]:
    """Units in which the tensor cores compute, and units of the whole."""
    computing = sum(e.end - e.start for e in events if "products" in e.row)
    return computing, max(e.end for e in events)


def words(events: Sequence[Event], stages: int, time: int) -> list[tuple[str, str]]:
    """What the producer and each consumer do in the unit that starts at ``time``."""
    now = {e.row: e for e in events if e.start <= time < e.end}
    left = any(e.row == PRODUCER and e.start > time for e in events)
    sentences = [
        (
            "Producer",
            _copying(now[PRODUCER], stages)
            if PRODUCER in now
            else _WAITS
            if left
            else "All tiles are copied.",
        )
    ]
    for n in range(CONSUMERS):
        product, exponentials = now.get(products(n)), now.get(softmax(n))
        parts = [] if product is None else [_MULTIPLIES[product.name].format(product.tile)]
        parts += (
            [] if exponentials is None else [f"Softmax of tile {exponentials.tile}, beside the tensor cores."]
        )
        first = min(e.start for e in events if e.row == products(n))
        last = max(e.end for e in events if e.row == products(n))
        idle = (
            "Waits for its first tile."
            if time < first
            else "O / l is ready to be stored."
            if time >= last
            else _TURN
        )
        sentences.append((f"Consumer {n + 1}", " ".join(parts) or idle))
    return sentences


_WAITS = "Waits: the next tile needs a stage that a consumer still reads."
_TURN = "Waits for its ping-pong slot, or for a tile."
_MULTIPLIES = {
    "S": "S = Q Kᵀ of tile {} on the tensor cores.",
    "P V": "O += P V of tile {} on the tensor cores.",
}


def _copying(event: Event, stages: int) -> str:
    if event.tile < 0:
        return "Copies Q, 64 rows for each consumer, to shared memory."
    return (
        f"Copies {event.name} of tile {event.tile} to stage {event.tile % stages} of the {event.name} ring."
    )
