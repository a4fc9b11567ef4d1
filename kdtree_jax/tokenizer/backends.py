"""Two kinds of tokenizer: a `tokenizer.json`, and Kimi's ranks for `tiktoken`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import tiktoken
import tokenizers

# Kimi's and Moonlight's words (`pat_str` of tokenization_kimi.py and of
# tokenization_moonshot.py): runs of Chinese characters by themselves; other letters as
# an optional sign, capitals, small letters and an English ending; up to three digits;
# signs; line ends; blanks. `&&` takes classes' common part.
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SIGN = r"[^\r\n\p{L}\p{N}]?"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = "|".join(
  (
    r"[\p{Han}]+",
    f"{_SIGN}{_CAPITALS}*{_SMALL}+{_ENDING}",
    f"{_SIGN}{_CAPITALS}+{_SMALL}*{_ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
  )
)
# Ids after the ranks are special tokens, named or not.
_KIMI_RESERVED = 256
_MOST_SPECIAL = 4096
# Kimi's code cuts what tiktoken cannot take at once. It shows in the tokens.
_MOST_CHARACTERS = 400_000
_LONGEST_RUN = 25_000


class Backend(Protocol):
  """What a `Tokenizer` needs."""

  @property
  def vocab_size(self) -> int:
    """The largest id plus one."""
    ...

  def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

  def token_id(self, token: str) -> int | None: ...


class JsonBackend:
  """A `tokenizer.json`."""

  def __init__(self, text: str) -> None:
    """Reads the file's contents.

    Raises:
      ValueError: they are not a tokenizer's.
    """
    try:
      self.tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The package has no class of its own for it.
      raise ValueError(f"is not a tokenizer: {error}") from error
    self.tokenizer.no_truncation()
    self.tokenizer.no_padding()
    self._size = self._count()

  def add(self, tokens: Mapping[int, tokenizers.AddedToken]) -> None:
    """Adds tokens that `tokenizer_config.json` has besides.

    Raises:
      ValueError: an id is not the one that the token gets, or has.
    """
    for wanted, token in sorted(tokens.items()):
      if self.token_id(token.content) is None:
        self.tokenizer.add_tokens([token])
      found = self.token_id(token.content)
      if found != wanted:
        raise ValueError(
          f"{token.content!r} has id {found} in tokenizer.json, and {wanted} here"
        )
    self._size = self._count()

  def _count(self) -> int:
    return 1 + max(self.tokenizer.get_vocab().values(), default=-1)

  @property
  def vocab_size(self) -> int:
    return self._size

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

  def token_id(self, token: str) -> int | None:
    return self.tokenizer.token_to_id(token)


class KimiBackend:
  """Ranks of byte pairs with special tokens after them, as Kimi and Moonlight ship."""

  def __init__(
    self, ranks: Mapping[bytes, int], named: Mapping[int, str], special: set[int]
  ) -> None:
    """Puts the tokens together.

    Args:
      ranks: of `parse_ranks`.
      named: special tokens by id, beyond the ranks. Other ids of the reserved block are
        called "<|reserved_token_ID|>".
      special: ids that `skip_special_tokens` skips.

    Raises:
      ValueError: an id is a rank's, or a name is there twice.
    """
    first = len(ranks)
    if named and min(named) < first:
      raise ValueError(f"id {min(named)} is one of the {first} of tiktoken.model")
    end = max(first + _KIMI_RESERVED, 1 + max(named, default=0))
    if end > first + _MOST_SPECIAL:
      raise ValueError(
        f"id {end - 1} is beyond the {_MOST_SPECIAL} that may follow tiktoken.model's"
      )
    names = [named.get(i, f"<|reserved_token_{i}|>") for i in range(first, end)]
    self._special = {name: first + i for i, name in enumerate(names)}
    if len(self._special) != len(names):
      twice = next(name for name in names if names.count(name) > 1)
      raise ValueError(f"{twice!r} is the name of two special tokens")
    self._skipped = special
    self._ranks = dict(ranks)
    self._encoding = tiktoken.Encoding(
      "kimi",
      pat_str=KIMI_WORDS,
      mergeable_ranks=self._ranks,
      special_tokens=self._special,
    )

  @property
  def vocab_size(self) -> int:
    return len(self._ranks) + len(self._special)

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    del add_special_tokens  # There are none to add.
    ids: list[int] = []
    for piece in _pieces(text):
      ids += self._encoding.encode(piece, allowed_special="all")
    return ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    if skip_special_tokens:
      ids = [i for i in ids if i not in self._skipped]
    return self._encoding.decode(list(ids))

  def token_id(self, token: str) -> int | None:
    found = self._special.get(token)
    return self._ranks.get(token.encode()) if found is None else found


def parse_ranks(contents: bytes) -> dict[bytes, int]:
  """Reads a `tiktoken.model`: lines of a token in base64 and its rank.

  Raises:
    ValueError: a line is something else, a token or a rank is there twice, ranks do not
      count from 0, or a byte is missing, without which there would be texts that have
      no tokens.
  """
  ranks: dict[bytes, int] = {}
  for number, line in enumerate(contents.splitlines(), 1):
    if not line.strip():
      continue
    try:
      token, rank = line.split()
      token, rank = base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error) as error:
      raise ValueError(f"line {number} is not a token in base64 and a rank") from error
    if token in ranks:
      raise ValueError(f"line {number} has a token of an earlier line")
    ranks[token] = rank
  if sorted(ranks.values()) != list(range(len(ranks))):
    raise ValueError(f"the ranks of {len(ranks)} tokens do not count from 0")
  missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
  if missing:
    raise ValueError(f"byte {missing[0]} is missing ({len(missing)} of 256 are)")
  return ranks


def _pieces(text: str) -> Iterator[str]:
  """The text in pieces in which no run of blanks or of others is too long."""
  for start in range(0, len(text), _MOST_CHARACTERS):
    part, begin = text[start : start + _MOST_CHARACTERS], 0
    for run in re.finditer(r"\s+|\S+", part):
      for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
        yield part[begin:cut]
        begin = cut
    yield part[begin:]
