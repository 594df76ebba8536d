"""Seeds and mutations that keep most of a state's structure, for tools/fuzz."""

import random
from collections.abc import Callable
from struct import pack

from cachefs.states import Cutter

from ..data.load import real_states
from . import build

# Counts and magics that decide something somewhere.
WORDS = [
    *(0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 30, 32, 34, 64, 77, 256, 257, 300, 4096, 4097),
    *(0x67677371, 0x6767736E, 0xAF143CD8, 0x34565344, 0x53574143, 0x50414732, 0x4C434B50, 0x50435332),
    *(1 << 16, 1 << 20, 1 << 21, (1 << 21) + 1, 1 << 26, 1 << 30, 1 << 31, 0xFFFFFFFE, 0xFFFFFFFF),
]
HEAD = 2000


def seeds() -> list[bytes]:
    """Small states of every layout, and the beginnings of real ones."""
    p = list(range(6))
    window = [4, 5]
    small = {"width": 16}
    many = [[0, 1], [1]] * 3
    made = [
        build.ggsq(p, build.kv(p, **small)),
        build.ggsq(build.packed(p), build.kv(p, **small, ext=12)),
        build.ggsq(p, build.kv(p, **small, ext=8, rotations=None), version=2),
        build.ggsq(p, build.kv(p, **small, rotations=None), version=3),
        build.ggsq(p, build.kv(p, width=34, type_id=8, v="plain")),
        build.ggsq(p, build.kv(p, **small, v="transposed")),
        build.ggsq(p, build.kv(p, **small, v="transposed", v_layers=[1])),
        build.ggsq(p, build.kv(p, **small, v=None), build.kv(p, layers=1, width=32, v=None)),
        build.ggsq(p, build.kv(p, **small), build.kv(window, **small)),
        build.ggsq(p, build.kv(p, layers=0), build.kv(window, **small)),
        build.ggsq(p, build.kv(p, layers=3, width=[16, 0, 16])),
        build.ggsq(p, build.kv(p, **small, streams=3, at=1)),
        build.ggsn(p, pack("<I", 2) + build.stream(p, **small) + build.stream(window, **small, slot=1)),
        build.ggsq(p, build.kv(p, **small), build.recurrent(r_width=16, s_width=32)),
        build.ggsq(
            p, build.kv(p, **small), build.recurrent(r_width=16, s_width=32, ple=8), build.kv(p, v=None)
        ),
        build.ggsq(p, build.recurrent(r_width=16, s_width=0)),
        build.ggsn(
            p, build.recurrent([5, 9], r_width=16, s_width=32, seqs=[[0, 2], [1]]), architecture="mamba"
        ),
        build.ggsq(p, dsv4(p, window)),
        build.ggsn(p, build.kv(p, **small, seqs=many)),
        build.ggsn(p, build.kv(p, **small, seqs=many, ext=12), architecture="qwen2vl"),
        build.ggsn(p, pack("<IiQ", 1, 0, 9) + build.noise(36) + pack("<Q", 0), build.kv(p, rotations=None)),
        build.blob(build.kv(p, **small)),
        build.blob(build.kv(p, **small)) + build.blob(build.recurrent(r_width=16, s_width=32)) * 2,
        build.kv(p, **small),
        build.ggsq(p, build.old_kv(p, **small), version=2),
        build.ggsq(p, build.old_kv(p, n_seq=0, **small), version=2),
        build.ggsq(p, build.ik_kv(p, width=16), version=3),
        build.ggsq(p, build.ik_kv(p, width=16, v_state=2), version=4),
        build.ggsq([], build.kv([])),
        build.ggsq(p, build.noise(200)),
        build.noise(100),
        pack("<I", 0xAF143CD8) * 20,
        b"",
    ]
    for state in real_states().values():
        made.append(state[:HEAD])
    return made


def dsv4(p: list[int], window: list[int]) -> bytes:
    """deepseek4's parts, smaller than a model has them."""
    parts = [build.kv(p, layers=1, width=16, v=None), build.kv(window, layers=1, width=16, v=None)]
    parts += [build.dsv4_k(3, layers=1, width=16), build.dsv4_k(0, layers=1, width=16)]
    parts += [build.dsv4_state(4, 2, layers=1, width=16), build.dsv4_state(128, 1, layers=2, width=8)]
    return pack("<III", 0x34565344, 1, 0) + b"".join(parts)


class Mutator:
    """One to four changes, most of them where headers are."""

    def __init__(self, pool: list[bytes]) -> None:
        self.pool = pool
        self.changes: list[Callable[[bytearray, int, random.Random], None]] = [
            self.flip,
            self.word,
            self.word,
            self.step,
            self.insert,
            self.drop,
            self.truncate,
            self.splice,
            self.double,
            self.zeros,
        ]

    def __call__(self, data: bytes, dice: random.Random) -> bytes:
        if dice.random() < 0.02 or not data:
            data = dice.choice(self.pool)
        edges = self.edges(data) if dice.random() < 0.2 else []
        new = bytearray(data)
        for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 4))):
            if edges and dice.random() < 0.7:
                at = min(
                    len(new), dice.choice(edges) + dice.choice((0, 0, 4, 8, 12, -4, -8, dice.randrange(32)))
                )
            else:
                at = int(dice.random() ** dice.choice((1, 3, 6)) * len(new))
            dice.choice(self.changes)(new, max(0, at), dice)
        return bytes(new)

    @staticmethod
    def edges(data: bytes) -> list[int]:
        """Where modules and sections start."""
        cutter = Cutter(target=1 << 20)
        cutter.feed(data)
        cutter.finish()
        modules = cutter.report.modules[:50]
        found = [module.offset for module in modules]
        found += [section.offset for module in modules for section in module.sections[:20]]
        if cutter.report.stopped:
            found.append(cutter.report.stopped[0])
        return found

    @staticmethod
    def flip(data: bytearray, at: int, dice: random.Random) -> None:
        if at < len(data):
            data[at] ^= 1 << dice.randrange(8)

    @staticmethod
    def word(data: bytearray, at: int, dice: random.Random) -> None:
        data[at : at + 4] = dice.choice(WORDS).to_bytes(4, "little")

    @staticmethod
    def step(data: bytearray, at: int, dice: random.Random) -> None:
        value = int.from_bytes(data[at : at + 4], "little") + dice.choice((-2, -1, 1, 2, 64))
        data[at : at + 4] = (value % (1 << 32)).to_bytes(4, "little")

    @staticmethod
    def insert(data: bytearray, at: int, dice: random.Random) -> None:
        data[at:at] = b"".join(
            dice.choice(WORDS).to_bytes(4, "little") for _ in range(dice.choice((1, 1, 2, 4)))
        )

    @staticmethod
    def drop(data: bytearray, at: int, dice: random.Random) -> None:
        del data[at : at + dice.choice((1, 2, 4, 4, 8, 12, 16, 100))]

    @staticmethod
    def truncate(data: bytearray, at: int, dice: random.Random) -> None:
        del data[at:]

    def splice(self, data: bytearray, at: int, dice: random.Random) -> None:
        other = dice.choice(self.pool)
        begin = dice.randrange(len(other) + 1) if dice.random() < 0.5 else 0
        data[at:at] = other[begin : begin + dice.choice((16, 100, 1000))]

    @staticmethod
    def double(data: bytearray, at: int, dice: random.Random) -> None:
        size = dice.choice((4, 12, 40, 500))
        data[at:at] = data[at : at + size] * dice.choice((1, 1, 2, 8))

    @staticmethod
    def zeros(data: bytearray, at: int, dice: random.Random) -> None:
        data[at:at] = bytes(dice.choice((1, 4, 8, 12, 64, 1024)))
