"""The store: blocks, recipes and the tree in LMDB. Knows nothing of FUSE or llama.

``layout``   what lies where on disk, and how the maximum is shared out
``home``     the directory: made, recognised, locked
``clean``    a mark that it was closed in order
``index``    the index environment and its pending changes
``volumes``  the environments that hold payloads
``records``  fixed-size records and keys
``blocks``   finding, holding, reading and adding blocks
``place``    pieces of a file → records of its recipe
``recipe``   recipes; ``assemble`` reads a file through one
``tree``     inodes, dirents, extended attributes, content
``codec``    payloads, packed by byte planes; ``decoded`` keeps what was unpacked last
``recompress`` packs blocks later; ``replace`` gives them their new payloads
``writer``   everything that writes to LMDB
``evict``    units and their order; ``shrink`` for a lowered maximum
``store``    the whole, opened for writing; ``reader`` beside a daemon
"""

from cachefs.store.blocks import Now
from cachefs.store.errors import Damaged, StoreFailed, StoreFull, StoreRefused
from cachefs.store.store import Store

__all__ = ["Damaged", "Now", "Store", "StoreFailed", "StoreFull", "StoreRefused"]
