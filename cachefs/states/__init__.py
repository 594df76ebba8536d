"""What a saved KV state looks like, and where to cut it."""

from .cutter import Cutter
from .pieces import Band, Buffer, Chunk, Piece, Rows
from .report import Module, Report, Section

__all__ = ["Band", "Buffer", "Chunk", "Cutter", "Module", "Piece", "Report", "Rows", "Section"]
