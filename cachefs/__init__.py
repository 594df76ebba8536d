"""cachefs: llama.cpp KV-cache states on disk, each distinct row stored once."""

__version__ = "0.1.0"
