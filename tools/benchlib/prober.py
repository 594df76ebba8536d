#!/usr/bin/env python3
"""Read 4 KiB at random places of a file until standard input ends; print each read's seconds.

prober.py FILE
"""

import os
import random
import select
import sys
import time


def main() -> None:
    """Say "ready", then read every few milliseconds."""
    fd = os.open(sys.argv[1], os.O_RDONLY)
    size = os.fstat(fd).st_size
    rng = random.Random(1)
    times: list[float] = []
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        offset = rng.randrange(size - 4096)
        start = time.perf_counter()
        os.pread(fd, 4096, offset)
        times.append(time.perf_counter() - start)
    print(*times)


if __name__ == "__main__":
    main()
