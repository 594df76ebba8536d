"""ggml's tensor types, as far as they can stand in a cache.

Ids, block lengths and block sizes are those of ggml.h and ggml-common.h (llama.cpp, October 2026). Forks add
ids of their own, so an unknown id is never a reason alone to reject a section.
"""

from typing import NamedTuple


class GgmlType(NamedTuple):
    """One tensor type: ``block`` elements are stored in ``bytes`` bytes."""

    name: str
    block: int
    bytes: int


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("f32", 1, 4),
    1: GgmlType("f16", 1, 2),
    2: GgmlType("q4_0", 32, 18),
    3: GgmlType("q4_1", 32, 20),
    6: GgmlType("q5_0", 32, 22),
    7: GgmlType("q5_1", 32, 24),
    8: GgmlType("q8_0", 32, 34),
    9: GgmlType("q8_1", 32, 36),
    10: GgmlType("q2_K", 256, 84),
    11: GgmlType("q3_K", 256, 110),
    12: GgmlType("q4_K", 256, 144),
    13: GgmlType("q5_K", 256, 176),
    14: GgmlType("q6_K", 256, 210),
    15: GgmlType("q8_K", 256, 292),
    20: GgmlType("iq4_nl", 32, 18),
    23: GgmlType("iq4_xs", 256, 136),
    24: GgmlType("i8", 1, 1),
    25: GgmlType("i16", 1, 2),
    26: GgmlType("i32", 1, 4),
    28: GgmlType("f64", 1, 8),
    30: GgmlType("bf16", 1, 2),
    39: GgmlType("mxfp4", 32, 17),
    40: GgmlType("nvfp4", 64, 36),
}


def type_name(type_id: int) -> str:
    """The type's name, or ``type 77`` for an id that upstream does not have."""
    known = GGML_TYPES.get(type_id)
    return known.name if known else f"type {type_id}"
