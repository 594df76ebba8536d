"""The kernel side: FUSE operations, open files, upkeep, and the daemon's life.

``operations``  the FUSE handlers, thin
``attributes``  inode records as the kernel wants them
``content``     what an open file holds; ``stream`` a save in progress,
                ``overlay`` bytes written out of order
``readahead``   sequential reads
``upkeep``      commits, eviction, room; ``recompress`` compresses when nobody is there
``mountpoint``, ``daemon``, ``life``, ``notify``, ``processes``  mounting and unmounting
"""
