"""What tools/bench is made of: the mounts and clients it measures with, and one module a kind of figure."""
