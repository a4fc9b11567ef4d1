"""KDTR files taken apart and put together by the format's page alone."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any


def parse(contents: bytes) -> tuple[bytes, bytes]:
  """JSON header and data section, by the format's page alone."""
  (length,) = struct.unpack_from("<Q", contents, 16)
  start = (32 + length + 63) // 64 * 64
  return contents[32 : 32 + length], contents[start:]


def assemble(header: dict[str, Any] | str | bytes, data: bytes = b"") -> bytes:
  """A file whose sizes and CRCs fit, whatever the header says."""
  if isinstance(header, dict):
    header = json.dumps(header)
  raw = header if isinstance(header, bytes) else header.encode("utf-8")
  padding = bytes(-(32 + len(raw)) % 64)
  total = 32 + len(raw) + len(padding) + len(data)
  preamble = b"KDTR" + struct.pack("<IQQI", 1, total, len(raw), zlib.crc32(raw))
  return preamble + struct.pack("<I", zlib.crc32(preamble)) + raw + padding + data
