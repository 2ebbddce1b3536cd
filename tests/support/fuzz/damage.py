"""Damage a file as disks, interrupted copies and editors do."""

import random


def damage(data: bytes, draw: random.Random) -> bytes:
    """Return other contents: truncated, with flipped bits, or with a part removed, repeated, moved or overwritten."""
    while (damaged := draw.choice(_KINDS)(data, draw)) == data:
        pass
    return damaged


def _truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def _truncate_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: draw.randrange(len(lines))])


def _flip(data: bytes, draw: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def _change_digit(data: bytes, draw: random.Random) -> bytes:
    digits = [index for index, byte in enumerate(data) if chr(byte).isdigit()]
    index = draw.choice(digits)
    return data[:index] + str(draw.randrange(10)).encode() + data[index + 1 :]


def _remove(data: bytes, draw: random.Random) -> bytes:
    start, end = _draw_range(data, draw)
    return data[:start] + data[end:]


def _repeat(data: bytes, draw: random.Random) -> bytes:
    start, end = _draw_range(data, draw)
    return data[:end] + data[start:]


def _move(data: bytes, draw: random.Random) -> bytes:
    start, end = _draw_range(data, draw)
    rest = data[:start] + data[end:]
    at = draw.randrange(len(rest) + 1)
    return rest[:at] + data[start:end] + rest[at:]


def _overwrite(data: bytes, draw: random.Random) -> bytes:
    start, end = _draw_range(data, draw)
    new = draw.choice((bytes(end - start), draw.randbytes(end - start), b"\n" * (end - start), b"[" * 100_000))
    return data[:start] + new + data[end:]


def _replace_number(data: bytes, draw: random.Random) -> bytes:
    """Replace a run of digits by another number, or by text that a reader does not take as a number."""
    starts = [
        index for index in range(1, len(data)) if chr(data[index]).isdigit() and not chr(data[index - 1]).isdigit()
    ]
    start = end = draw.choice(starts)
    while end < len(data) and chr(data[end]).isdigit():
        end += 1
    return data[:start] + draw.choice((b"Infinity", b"NaN", b"-1", b"1e999", b"9" * 5000, b"null", b'"')) + data[end:]


def _draw_range(data: bytes, draw: random.Random) -> tuple[int, int]:
    start = draw.randrange(len(data))
    return start, min(len(data), start + draw.choice((1, 4, 64, 512)))


_KINDS = (*(_truncate, _truncate_lines, _flip, _change_digit, _remove), *(_repeat, _move, _overwrite, _replace_number))
