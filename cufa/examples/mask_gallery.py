"""Masks: what each query sees, and how many tiles attention visits for it."""

import numpy as np

from cufa import masks
from cufa.schedule.schedule import Schedule

GALLERY = [
    masks.full(),
    masks.causal(),
    masks.window(4, 0),
    masks.prefix(6),
    masks.streaming(2, 4),
    masks.global_window(1, 3, 3),
    masks.chunks(5),
    masks.documents([6, 4, 6]),
]


def main() -> None:
    for mask in GALLERY:
        print(mask)
        for row in mask.dense(16, 16):
            print("".join(np.where(row, "█", "·")))
        schedule = Schedule(16, 16, 4, 4, mask)
        print(f"{schedule.visited} of {schedule.total} tiles of 4 × 4 are visited\n")


if __name__ == "__main__":
    main()
