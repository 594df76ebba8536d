"""The parser of whole files: containers, modules one after the other, and foreign bytes between them."""

from struct import unpack_from

from .dsv4 import parse_dsv4
from .headers import (
    LOOK,
    container_start,
    dsv4_start,
    kv_empty,
    kv_start,
    old_kv_start,
    recurrent_start,
    u32,
)
from .kv import parse_kv
from .recurrent import parse_recurrent
from .source import Source, Step

_OUTPUTS_MOST = 1 << 20
_LOGITS_MOST = 1 << 31
# What may be spent on modules that turn out to be none, or tiny, in one file, before recognition is given up:
# an attempt costs about as much as cutting so many bytes.
_WASTED_MOST = 256 << 20
_ATTEMPT = 16384


def parse_file(source: Source) -> Step[None]:
    """Recognise what can be recognised and cut all of it, to the end of the file."""
    while source.wasted < _WASTED_MOST:
        view = yield from source.peek(LOOK)
        if not view:
            return
        source.wasted += _ATTEMPT
        offset = source.offset
        kind = container_start(view)
        if kind is not None:
            yield from _container(source, kind)
            view = yield from source.peek(LOOK)
            if not view:
                return
        elif offset == 0:
            source.report.states = 1
        if (yield from _modules(source)):
            source.wasted -= min(_ATTEMPT, source.offset - offset)
            continue
        if source.report.stopped is None or source.report.stopped[0] < offset:
            source.stop("no module starts here")
        yield from source.foreign()
    yield from source.plain()


def _container(source: Source, kind: str) -> Step[None]:
    """A container's head: u32 magic, i32 seq_id; or u32 magic, u32 version, u32 words and tokens."""
    report = source.report
    first = not report.states
    report.states += 1
    head = yield from source.peek(24)
    if first:
        report.container = kind
    if kind == "blob":
        source.promise(source.offset + 8)
        source.chunk(min(8, len(head)))
        return
    words = u32(head, 8)
    if first:
        report.version = u32(head, 4)
        report.tokens = _tokens(head, words)
    source.promise(source.offset + 12 + 4 * words)
    yield from source.chunks(12 + 4 * words)
    if kind == "ggsn":
        yield from _architecture(source, first)


def _tokens(head: bytes, words: int) -> int:
    """Token ids in a payload: packed as -1, 1, n, ids … (llama-server since August 2026) or bare."""
    if words >= 3 and len(head) >= 24:
        mark, version, count = unpack_from("<iII", head, 12)
        if mark == -1 and version == 1 and count <= words:
            return int(count)
    return words


def _architecture(source: Source, first: bool) -> Step[None]:
    """u32 length and the architecture's name (llama_context::state_write_data)."""
    head = yield from source.peek(4)
    length = u32(head, 0)
    if not 1 <= length <= 64:
        return
    name = (yield from source.peek(length, 4)).decode("ascii", "replace")
    if len(name) < length or not name.isprintable() or not name.isascii():
        return
    if first:
        source.report.architecture = name
    source.chunk(4 + length)


def _modules(source: Source) -> Step[bool]:
    """Modules from here on, up to a container or the end of the file; False where nothing validates."""
    first = True
    while source.wasted < _WASTED_MOST:
        view = yield from source.peek(LOOK)
        if not view or (not first and container_start(view)):
            return True
        before = source.offset
        if first and before and len(view) < 8:
            source.promise(before + 8)
            source.chunk(len(view))
            return True
        if kv_start(view):
            good = yield from parse_kv(source, old=False)
        elif dsv4_start(view):
            good = yield from parse_dsv4(source)
        elif old_kv_start(view):
            good = yield from parse_kv(source, old=True)
        elif recurrent_start(view):
            good = yield from parse_recurrent(source)
        elif source.report.states and before and kv_empty(view):
            good = yield from parse_kv(source, old=False)
        elif first and source.report.container == "ggsn":
            good = yield from _outputs(source)
        else:
            return False
        if not good or source.offset == before:
            return False
        if not first:
            source.charge(_ATTEMPT, source.offset - before)
        first = False
    source.stop("too many small modules")
    return False


def _outputs(source: Source) -> Step[bool]:
    """What session files before February 2026 had between architecture and modules.

    u32 n_outputs, i32 output_pos[n_outputs], u64 n_logits, f32 logits, u64 n_embd, f32 embeddings.
    """
    head = yield from source.peek(4)
    outputs = u32(head, 0)
    if outputs > _OUTPUTS_MOST:
        return False
    at = 4 + 4 * outputs
    word = yield from source.peek(8, at)
    logits = int.from_bytes(word, "little")
    if len(word) < 8 or logits > _LOGITS_MOST:
        return False
    yield from source.chunks(at + 8)
    yield from source.fixed(4 * logits)
    word = yield from source.peek(8)
    embeddings = int.from_bytes(word, "little")
    if len(word) < 8 or embeddings > _LOGITS_MOST:
        return False
    source.chunk(8)
    yield from source.fixed(4 * embeddings)
    return True
