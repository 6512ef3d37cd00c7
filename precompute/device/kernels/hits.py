"""PTX of what a GPU's thread does with its part of a tile of products: an entry for each group that reaches a limit.

From Triton's operators come 30 instructions for every group, most of which move nothing but zeros.
"""

from itertools import product

ROWS = 2
"""Rows of a tile that a thread has part of."""


def writing(groups: int) -> tuple[str, str]:
    """(instructions, constraints) for `above`, where a thread has so many groups of four scores of two rows.

    Given are for each group its scores, one after the other for both rows each, then limit, margin, number taken,
    address, first group's number, how many groups are real and how many have room; out comes the number taken. The
    next group of the same rows is four further on. An entry is a bound, the group's number, and its scores in halves.
    """
    after = ROWS + 4 * ROWS * groups
    limit, margin, entry_counts, address, number, real, room = (
        [f"${after + ROWS * operand_index + row}" for row in range(ROWS)]
        for operand_index in range(7)
    )
    lines = [f"mov.b32 ${row}, {entry_counts[row]};" for row in range(ROWS)]
    for group, row in product(range(groups), range(ROWS)):
        zero, score_one, two, three = (
            f"${ROWS + 8 * group + 2 * member + row}" for member in range(4)
        )
        if row == 0:
            lines += [
                f"add.s32 group, {number[row]}, {4 * group};",
                f"setp.lt.s32 known, group, {real[row]};",
            ]
        lines += [
            f"max.f32 highest, {zero}, {score_one};",
            f"max.f32 other, {two}, {three};",
            "max.f32 highest, highest, other;",
            f"setp.ge.and.f32 hit, highest, {limit[row]}, known;",
            f"setp.lt.and.s32 written, ${row}, {room[row]}, hit;",
            f"add.f32 highest, highest, {margin[row]};",
            f"cvt.rn.f16x2.f32 low, {score_one}, {zero};",
            f"cvt.rn.f16x2.f32 high, {three}, {two};",
            "mov.b32 bound, highest;",
            f"mad.wide.s32 to, ${row}, 16, {address[row]};",
            "@written st.global.v4.b32 [to], {bound, group, low, high};",
            f"@hit add.s32 ${row}, ${row}, 1;",
        ]
    head = [
        "{",
        ".reg .pred known, hit, written;",
        ".reg .f32 highest, other;",
        ".reg .b32 bound, group, low, high;",
        ".reg .b64 to;",
    ]
    kinds = (
        ["=&r"] * ROWS
        + ["f"] * (4 * ROWS * groups + 2 * ROWS)
        + ["r"] * ROWS
        + ["l"] * ROWS
        + ["r"] * (3 * ROWS)
    )
    return "\n".join([*head, *lines, "}"]), ",".join(kinds)
