"""The example on the format's page is what the code writes."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from kdtree_jax.checkpoint import kdtr

PAGE = Path(__file__).parents[2] / "docs" / "kdtr.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """The file that the page's own snippet writes."""
  (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  monkeypatch.chdir(tmp_path)
  exec(snippet, {})
  return tmp_path / "example.kdtr"


def test_hex_dump(example: Path):
  lines = re.findall(
    r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} +){16})\|", PAGE.read_text(), re.M
  )
  dump = bytes.fromhex("".join(values for _, values in lines))
  assert [int(offset, 16) for offset, _ in lines] == list(range(0, len(dump), 16))
  assert example.read_bytes() == dump


def test_numbers_in_the_text(example: Path):
  text = PAGE.read_text()
  with kdtr.open_kdtr(example, verify="open") as file:
    assert f"`{file.fingerprint}`" in text
    assert file.read("a").tolist() == [1.0, -2.5, 0.0]
    assert file.read("q").tolist() == [[-8, -1], [0, 7]]
    crc = file.info("q").crc32
  assert f"{crc} = {crc:#x}" in text
  assert f"`{zlib.crc32(b'123456789'):#X}`".replace("0X", "0x") in text
