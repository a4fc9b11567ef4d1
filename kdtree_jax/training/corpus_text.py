"""Which files become training documents, and which never may.

Selection keeps readable, hand-written, parseable sources. Near copies go by the
share of long lines seen before. Decontamination drops every document that
carries a held-out benchmark problem, by three independent signs.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"


@dataclasses.dataclass(frozen=True)
class Document:
  """One text of the corpus.

  Attributes:
    name: `package/path`, without the version, so that it outlives upgrades.
    text: its contents.
    kind: "code", "prose", "function" or "problem".
  """

  name: str
  text: str
  kind: str = "code"


_SKIPPED_PATH = re.compile(
  r"(^|/)(tests?|testing|_?vendor(ed)?|_?extern(als?)?|third_party|locale|node_modules"
  r"|__pycache__|asv_bench|benchmarks?)(/|$)"
  r"|(^|/)(test_[^/]*|[^/]*_tests?|conftest|setup|_version|versioneer)\.py$",
  re.IGNORECASE,
)
_SKIPPED_PROSE = re.compile(
  r"change|whatsnew|release|history|news|licen[sc]e|author|contribut|requirements"
  r"|\.egg-info|top_level|whats_new|roots|credits|thanks|backers|faculty",
  re.IGNORECASE,
)
_GENERATED = re.compile(
  r"auto(matically)?[- ]?generated|do not edit|generated (by|from|using) "
  r"|DO NOT MODIFY|@generated",
  re.IGNORECASE,
)
_LICENCE = re.compile(r"copyright|licen[sc]e|SPDX", re.IGNORECASE)
_MIN_CHARS, _MAX_CODE, _MAX_PROSE = 200, 200_000, 100_000


def digest(text: str) -> int:
  """A stable 64-bit hash of a text (Python's own differs between processes)."""
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def strip_header(text: str) -> str:
  """Drops the leading comment block where it is a licence or copyright notice.

  Thousands of files begin with the same notice; the corpus names the licences
  once, in its manifest.
  """
  lines = text.split("\n")
  end = 0
  while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
    end += 1
  if _LICENCE.search("\n".join(lines[:end])):
    return "\n".join(lines[end:])
  return text


def read_text(data: bytes) -> str | None:
  """Decodes a file: UTF-8, no NUL, LF line ends; None where it is not text."""
  try:
    text = data.decode("utf-8-sig")
  except UnicodeDecodeError:
    return None
  return None if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")


def _looks_like_data(text: str, lines: list[str]) -> bool:
  """Tables, minified text and literals: long lines, many digits, few words."""
  if max(map(len, lines)) > 600 or len(text) / len(lines) > 75:
    return True
  letters = sum(map(str.isalpha, text))
  digits = sum(map(str.isdigit, text))
  foreign = sum(ord(c) > 127 for c in text)
  return (
    digits > 0.2 * letters or letters < 0.35 * len(text) or foreign > len(text) / 50
  )


def parse(text: str) -> ast.Module | None:
  """The syntax tree, or None where this interpreter cannot parse the text."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      return ast.parse(text)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def select(path: str, data: bytes) -> Document | None:
  """Decides whether a file becomes a document.

  Args:
    path: inside its package, with `/` separators.
    data: its contents.

  Returns:
    The document (its name is the path), or None for tests, vendored, generated,
    minified, table-like, too short, too long, undecodable or unparseable files.
  """
  prose = path.endswith((".rst", ".md", ".txt"))
  if _SKIPPED_PATH.search(path) or (prose and _SKIPPED_PROSE.search(path)):
    return None
  if len(data) > (_MAX_PROSE if prose else _MAX_CODE):
    return None
  text = read_text(data)
  if text is None or END_OF_TEXT in text or MASK in text:
    return None
  if not prose and _GENERATED.search(text[:3000]):
    return None
  text = (text if prose else strip_header(text)).strip("\n") + "\n"
  lines = text.split("\n")
  if len(text) < _MIN_CHARS or len(lines) < 8 or _looks_like_data(text, lines):
    return None
  if prose:
    return Document(path, text, "prose")
  return Document(path, text) if parse(text) is not None else None


class Deduplicator:
  """Remembers what was kept; says whether a text is a copy or nearly one.

  A text is a copy when its normalised form (no white space, no digits, no case)
  was seen, and nearly one when more than `share` of its long lines were.
  """

  def __init__(self, share: float = 0.6):
    self._share = share
    self._texts: set[int] = set()
    self._lines: set[int] = set()

  def is_copy(self, text: str) -> bool:
    """Tells whether `text` repeats earlier ones; remembers it if it does not."""
    whole = digest(re.sub(r"[\s\d]+", "", text).lower())
    if whole in self._texts:
      return True
    lines = {digest(s) for line in text.split("\n") if len(s := line.strip()) >= 24}
    if lines and len(lines & self._lines) > self._share * len(lines):
      return True
    self._texts.add(whole)
    self._lines |= lines
    return False


def is_held_out(name: str, per_mille: int = 15) -> bool:
  """Whether a document is never trained on: by its name alone, so it is stable."""
  return digest("held-out:" + name) % 1000 < per_mille


def _words(text: str) -> list[str]:
  return re.findall(r"[a-z0-9_]+", text.lower())


def _is_word(word: str) -> bool:
  return len(word) > 1 and not word.isdigit()


def _windows(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
  return zip(*(words[i:] for i in range(size)), strict=False)


def _shingles(words: Sequence[str], size: int) -> set[tuple[str, ...]]:
  return set(_windows(words, size))


class Decontaminator:
  """Finds documents that carry a benchmark problem.

  A document is dropped when it contains, white space aside, (1) the signature
  line of a problem's function and five consecutive words of its docstring,
  (2) ten consecutive words of any problem's docstring, at least six of which are
  no numbers (0, 1, 2, ... stands in many texts), or (3) a whole canonical
  solution of 40 characters or more.
  """

  def __init__(self, problems: Iterable[Mapping[str, str]]):
    """Reads HumanEval records: `prompt`, `entry_point`, `canonical_solution`."""
    self._passages: set[tuple[str, ...]] = set()
    self._signatures: dict[str, set[tuple[str, ...]]] = {}
    self._solutions: list[str] = []
    # Each of the signs needs one of these; most documents have none, and one pass
    # over their words clears them.
    self._hints: set[tuple[str, ...]] = set()
    for problem in problems:
      prompt = problem["prompt"]
      start = prompt.rindex(f"def {problem['entry_point']}(")
      signature, _, docstring = prompt[start:].partition("\n")
      words = _words(docstring)
      passages = _shingles(words, min(10, max(6, len(words))))
      self._passages |= {p for p in passages if sum(map(_is_word, p)) >= 6}
      fragments = _shingles(words, 5)
      key = "".join(signature.split())
      self._signatures.setdefault(key, set()).update(fragments)
      self._hints |= fragments
      solution = "".join(problem["canonical_solution"].split())
      if len(solution) >= 40:
        self._solutions.append(solution)
        self._hints.add(tuple(_words(problem["canonical_solution"])[:5]))
    self._hint_sizes = {len(hint) for hint in self._hints}
    self._passage_sizes = {len(passage) for passage in self._passages}

  def is_contaminated(self, text: str) -> bool:
    """Tells whether `text` carries one of the problems."""
    words = _words(text)
    if all(self._hints.isdisjoint(_windows(words, n)) for n in self._hint_sizes):
      return False
    for size in self._passage_sizes:
      if not self._passages.isdisjoint(_windows(words, size)):
        return True
    squeezed = "".join(text.split())
    if any(solution in squeezed for solution in self._solutions):
      return True
    found = [part for name, part in self._signatures.items() if name in squeezed]
    return any(not part.isdisjoint(_windows(words, 5)) for part in found)


def functions(document: Document) -> list[Document]:
  """Top-level functions of a file as documents of their own.

  Each is the imports it uses, then one undecorated function with a docstring:
  the shape of a completion prompt.

  Args:
    document: a code document.

  Returns:
    Documents of kind "function", named `file::function`.
  """
  tree = parse(document.text)
  if tree is None:
    return []
  lines = document.text.split("\n")
  imports: dict[str, str] = {}
  for node in tree.body:
    if isinstance(node, ast.Import | ast.ImportFrom):
      for alias in node.names:
        single = copy.copy(node)
        single.names = [alias]
        bound = alias.asname or alias.name.split(".")[0]
        if alias.name != "*" and getattr(node, "module", "") != "__future__":
          imports[bound] = ast.unparse(single)
  found = []
  for node in tree.body:
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
      continue
    if ast.get_docstring(node) is None or len(node.body) < 2:
      continue
    body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    if not _MIN_CHARS <= len(body) <= 3000:
      continue
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    head = sorted({line for name, line in imports.items() if name in used})
    text = ("\n".join(head) + "\n\n\n" if head else "") + body + "\n"
    found.append(Document(f"{document.name}::{node.name}", text, "function"))
  return found
