#!/usr/bin/env python3
"""Read 4 KiB at random places of files until standard input ends; print each read's seconds, a line a file.

prober.py FILE...
"""

import os
import random
import select
import sys
import time


def main() -> None:
    """Say "ready", then read from each file every millisecond or so."""
    files = [os.open(path, os.O_RDONLY) for path in sys.argv[1:]]
    size = min(os.fstat(fd).st_size for fd in files)
    rng = random.Random(1)
    times: list[list[float]] = [[] for _ in files]
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        for fd, found in zip(files, times, strict=True):
            offset = rng.randrange(size - 4096)
            start = time.perf_counter()
            os.pread(fd, 4096, offset)
            found.append(time.perf_counter() - start)
    for found in times:
        print(*found)


if __name__ == "__main__":
    main()
