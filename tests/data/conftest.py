"""The oracle's parser, which knows nothing of the package, checks the data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
