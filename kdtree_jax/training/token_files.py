"""Token files: raw uint16, and a small compressed form that travels.

`*.u16` is raw little-endian uint16. `*.u16.xz` holds, under LZMA, either the same
or a packed form: a magic, an 8-byte little-endian count, then two tokens (each
below 4096) in three bytes. Which one is smaller depends on the text, so the
writer tries both on a sample; the reader tells them apart by the magic, whose
first two bytes are no token below 4096.
"""

from __future__ import annotations

import lzma
import os
import pathlib

import numpy as np

_SAMPLE_TOKENS = 1_000_000
_MAGIC = b"KDTU12\0\0"
# What LZMA is told: raw tokens have an even period; packed ones have none it knows.
_FILTERS = {"raw": {"lc": 0, "lp": 1, "pb": 1}, "packed": {"lc": 0, "lp": 0, "pb": 0}}


def pack12(tokens: np.ndarray) -> bytes:
  """Packs tokens below 4096, two in three bytes, after their count (u64 LE).

  Args:
    tokens: integers [n], each in 0..4095.

  Raises:
    ValueError: a token does not fit 12 bits.
  """
  tokens = np.asarray(tokens)
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < 4096:
    raise ValueError(
      f"tokens must lie in 0..4095 to be packed, got {tokens.min()}..{tokens.max()}"
    )
  even = np.zeros(tokens.size + tokens.size % 2, np.uint16)
  even[: tokens.size] = tokens
  first, second = even[0::2], even[1::2]
  packed = np.empty((first.size, 3), np.uint8)
  packed[:, 0] = first & 0xFF
  packed[:, 1] = (first >> 8) | ((second & 0xF) << 4)
  packed[:, 2] = second >> 4
  return np.uint64(tokens.size).astype("<u8").tobytes() + packed.tobytes()


def unpack12(data: bytes) -> np.ndarray:
  """Reads what `pack12` wrote.

  Returns:
    uint16 [n].

  Raises:
    ValueError: the length does not match the count in front.
  """
  if len(data) < 8:
    raise ValueError(f"packed tokens need 8 bytes of count, got {len(data)} bytes")
  count = int(np.frombuffer(data, "<u8", 1)[0])
  if len(data) != 8 + 3 * ((count + 1) // 2):
    raise ValueError(f"packed tokens: {count} announced, but {len(data)} bytes long")
  packed = np.frombuffer(data, np.uint8, offset=8).reshape(-1, 3).astype(np.uint16)
  tokens = np.empty(2 * len(packed), np.uint16)
  tokens[0::2] = packed[:, 0] | ((packed[:, 1] & 0xF) << 8)
  tokens[1::2] = (packed[:, 1] >> 4) | (packed[:, 2] << 4)
  return tokens[:count]


def _payload(tokens: np.ndarray, form: str) -> bytes:
  if form == "packed":
    return _MAGIC + pack12(tokens)
  return tokens.astype("<u2").tobytes()


def compress(tokens: np.ndarray, form: str, preset: int = 6) -> bytes:
  """Compresses tokens as the contents of a `*.u16.xz` file.

  Args:
    tokens: uint16 [n], each in 0..4095.
    form: "raw" or "packed".
    preset: of LZMA, 0 (fast) to 9 (small).
  """
  filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, **_FILTERS[form]}]
  payload = _payload(tokens, form)
  return lzma.compress(payload, format=lzma.FORMAT_XZ, filters=filters)


def save_tokens(
  tokens: np.ndarray, folder: str | os.PathLike[str], name: str, preset: int = 6
) -> tuple[pathlib.Path, pathlib.Path]:
  """Writes `name.u16` and `name.u16.xz`, the latter in whichever form is smaller.

  Args:
    tokens: uint16 [n], each in 0..4095.
    folder: an existing folder.
    name: of the files, without suffix.
    preset: of LZMA, 0 (fast) to 9 (small).

  Returns:
    The paths of the raw and of the compressed file.
  """
  raw = pathlib.Path(folder) / f"{name}.u16"
  raw.write_bytes(_payload(tokens, "raw"))
  sample = tokens[:_SAMPLE_TOKENS]
  form = min(_FILTERS, key=lambda f: len(compress(sample, f, preset)))
  small = pathlib.Path(folder) / f"{name}.u16.xz"
  small.write_bytes(compress(tokens, form, preset))
  return raw, small


def load_tokens(path: str | os.PathLike[str]) -> np.ndarray:
  """Reads a token file.

  Args:
    path: `*.u16` or `*.u16.xz`.

  Returns:
    uint16 [n], in memory.

  Raises:
    ValueError: the suffix is neither, or the contents are damaged.
  """
  name = os.fspath(path)
  if not name.endswith((".u16", ".u16.xz")):
    raise ValueError(f"path {name!r} must end in .u16 or .u16.xz")
  data = pathlib.Path(path).read_bytes()
  if name.endswith(".xz"):
    try:
      data = lzma.decompress(data)
    except lzma.LZMAError as error:
      raise ValueError(f"{name}: damaged ({error})") from error
    if data.startswith(_MAGIC):
      return unpack12(data[len(_MAGIC) :])
  if len(data) % 2:
    raise ValueError(f"{name}: uint16 tokens need an even length, got {len(data)}")
  return np.frombuffer(data, "<u2").astype(np.uint16)
