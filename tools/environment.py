"""Run a tool with the checkout's own environment when the caller's Python lacks what it imports."""

import importlib.util
import os
import sys
from pathlib import Path

VENV = Path(__file__).parent.parent / ".venv"


def require(*modules: str) -> None:
    """Go on if the modules are there; else start again in .venv, or say what makes one."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return
    python = VENV / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])
    sys.exit(f"missing Python packages: {', '.join(missing)}; ./tools/test installs them")
