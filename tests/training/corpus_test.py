from __future__ import annotations

import collections
import json
import zipfile

import numpy as np
import pytest

from kdtree_jax.training import corpus, corpus_sources, corpus_text, token_files
from kdtree_jax.training.corpus_text import Deduplicator, Document

MODULE = '''"""Sums over sequences."""

import math
from collections import deque


def running_mean(values, window):
  """Returns the mean of the last `window` values at each step.

  >>> running_mean([1.0, 3.0], 2)
  [1.0, 2.0]
  """
  last = deque(maxlen=window)
  means = []
  for value in values:
    last.append(value)
    means.append(math.fsum(last) / len(last))
  return means


def undocumented(values):
  return [value + 1 for value in values]
'''

PROBLEM = {
  "prompt": (
    "from typing import List\n\n\n"
    "def turn_table(plates: List[int], turns: int) -> List[int]:\n"
    '    """ Turn the table of plates clockwise by the given number of turns, and\n'
    "    return the plates as the first guest now sees them.\n"
    '    """\n'
  ),
  "entry_point": "turn_table",
  "canonical_solution": (
    "    turns = turns % len(plates)\n    return plates[-turns:] + plates[:-turns]\n"
  ),
}


def padded(text: str) -> bytes:
  return (MODULE + text).encode()


def test_select_keeps_a_plain_module_without_its_licence_header():
  header = "# Copyright 2020 Somebody\n# Licensed under the MIT licence.\n\n"
  document = corpus_text.select("pkg/means.py", (header + MODULE).encode())
  assert document == Document("pkg/means.py", MODULE)


def test_select_keeps_a_leading_comment_that_is_no_licence():
  text = "# Means over windows.\n" + MODULE
  document = corpus_text.select("pkg/means.py", text.encode())
  assert document is not None and document.text == text


def test_select_normalises_line_ends():
  data = MODULE.replace("\n", "\r\n").encode("utf-8-sig")
  document = corpus_text.select("pkg/means.py", data)
  assert document is not None and document.text == MODULE


@pytest.mark.parametrize(
  "path",
  [
    "pkg/tests/means.py",
    "tests/means.py",
    "pkg/test_means.py",
    "pkg/means_test.py",
    "pkg/_vendor/means.py",
    "pkg/extern/means.py",
    "setup.py",
    "pkg/_version.py",
    "docs/changelog.rst",
    "docs/releases/1.0.txt",
  ],
)
def test_select_refuses_by_path(path):
  assert corpus_text.select(path, padded("")) is None


@pytest.mark.parametrize(
  "data",
  [
    b"# This file was automatically generated, do not edit.\n" + padded(""),
    padded("def broken(:\n"),
    padded("print 'python 2'\n"),
    padded("TABLE = [" + ", ".join(map(str, range(400))) + "]\n"),
    padded("".join(f"X{i} = {10**20 + i}\n" for i in range(100))),
    padded("NAME = '\0'\n"),
    padded("NAME = 'caf\xe9'\n").decode().encode("latin-1"),
    padded("END = '<|endoftext|>'\n"),
    padded("x = 1\n" * 40_000),
    b"x = 1\n",
  ],
  ids=[
    "generated",
    "syntax",
    "python2",
    "long line",
    "digits",
    "nul",
    "latin-1",
    "special token",
    "large",
    "small",
  ],
)
def test_select_refuses_by_contents(data):
  assert corpus_text.select("pkg/means.py", padded("")) is not None
  assert corpus_text.select("pkg/means.py", data) is None


def test_deduplicator_finds_copies_and_near_copies():
  duplicates = Deduplicator()
  assert not duplicates.is_copy(MODULE)
  assert duplicates.is_copy(MODULE)
  assert duplicates.is_copy(MODULE.replace("  ", "    ").upper())
  assert duplicates.is_copy(MODULE + "\n\ndef one_more_function(of, its, own): pass\n")
  fresh = "\n".join(f"def entirely_new_function_{c}(): pass" for c in "abcdefghijkl")
  assert not duplicates.is_copy(fresh)
  assert not duplicates.is_copy(fresh.replace("entirely_new", "not_the_same") + MODULE)


def test_hold_out_depends_on_the_name_alone_and_has_the_stated_share():
  names = [f"package/module_{i}.py" for i in range(20_000)]
  first = [n for n in names if corpus_text.is_held_out(n)]
  assert first == [n for n in reversed(names) if corpus_text.is_held_out(n)][::-1]
  # Binomial(20000, 0.015): mean 300, standard deviation 17; five of them.
  assert 215 <= len(first) <= 385
  # The choice is part of what was published: it may not drift with a refactoring.
  assert [int(n[15:-3]) for n in first[:4]] == [186, 251, 266, 339]


def test_shuffle_ignores_the_given_order():
  documents = [Document(f"d{i}", "x") for i in range(50)]
  order = corpus.shuffled(documents)
  assert order == corpus.shuffled(documents[::-1])
  assert order != documents
  assert order != corpus.shuffled(documents, seed=1)


@pytest.mark.parametrize(
  "text",
  [
    PROBLEM["prompt"],
    # Signature and a fragment of the docstring, with another layout.
    "def turn_table(plates: List[int],  turns: int) -> List[int]:\n"
    "  '''Turn the table\n  of plates'''\n",
    # The docstring alone, under another name.
    "def f(a):\n  '''turn the table of plates clockwise, by the given number'''\n",
    # The solution alone.
    "def f(plates, turns):\n  turns = turns % len(plates)\n"
    "  return plates[-turns:] + plates[:-turns]\n",
  ],
  ids=["prompt", "signature", "docstring", "solution"],
)
def test_decontaminator_finds_a_problem(text):
  benchmark = corpus_text.Decontaminator([PROBLEM])
  assert benchmark.is_contaminated(MODULE + text)


@pytest.mark.parametrize(
  "text",
  [
    "",
    "def turn_table(plates: List[int], turns: int) -> List[int]:\n  return plates\n",
    "turn the table of plates\n",
    "return plates[-turns:] + plates\n",
  ],
  ids=["nothing", "signature only", "five words only", "half a solution"],
)
def test_decontaminator_lets_others_pass(text):
  assert not corpus_text.Decontaminator([PROBLEM]).is_contaminated(MODULE + text)


def test_runs_of_numbers_are_no_sign_of_a_problem():
  counting = dict(PROBLEM, prompt=PROBLEM["prompt"] + "# 0 1 2 3 4 5 6 7 8 9 10 11\n")
  benchmark = corpus_text.Decontaminator([counting])
  assert not benchmark.is_contaminated("range(12): 0 1 2 3 4 5 6 7 8 9 10 11")


def test_clean_counts_what_it_drops():
  files = [
    ("means.py", padded("")),
    ("copy.py", padded("# a copy\n")),
    ("tests/means.py", padded("")),
    (
      "table.py",
      (PROBLEM["prompt"] + PROBLEM["canonical_solution"] + "x = 1\n" * 9).encode(),
    ),
  ]
  counts: collections.Counter[str] = collections.Counter()
  benchmark = corpus_text.Decontaminator([PROBLEM])
  kept = corpus.clean("pkg", files, Deduplicator(), benchmark, counts)
  assert counts == {"kept": 1, "duplicate": 1, "skipped": 1, "contaminated": 1}
  assert [d.kind for d in kept] == ["code"] and kept[0].name.startswith("pkg/")


def test_functions_are_cut_out_with_the_imports_they_use():
  (found,) = corpus_text.functions(Document("pkg/means.py", MODULE))
  assert found.name == "pkg/means.py::running_mean"
  assert found.kind == "function"
  head = "from collections import deque\nimport math\n\n\ndef running_mean("
  assert found.text.startswith(head)
  assert found.text.endswith("  return means\n")
  assert corpus_text.parse(found.text) is not None


def test_function_documents_keep_the_limit_and_drop_problems():
  benchmark = corpus_text.Decontaminator([PROBLEM])
  problem = PROBLEM["prompt"] + PROBLEM["canonical_solution"] + "\n" + "# x\n" * 50
  code = [Document("a.py", MODULE), Document("b.py", MODULE), Document("c.py", problem)]
  found = corpus.function_documents(code, 1e6, benchmark)
  assert [d.name for d in found] == ["a.py::running_mean"]
  assert corpus.function_documents(code, 10, benchmark) == []


@pytest.fixture(scope="module")
def tokenizer():
  return corpus.train_tokenizer([MODULE * 3, PROBLEM["prompt"]] * 4, vocab_size=400)


def test_tokenizer_returns_any_text_unchanged(tokenizer):
  rng = np.random.default_rng(0)
  texts = [
    "",
    "\n",
    "  \n\t\n    x",
    "naïve 漢字 \U0001f600\u0000",
    MODULE,
    "\r\n\r\n ",
  ]
  for _ in range(200):
    codes = rng.choice([9, 10, 13, 32, 65, 0x7F, 0xE9, 0x3042, 0x1F600], size=30)
    texts.append("".join(map(chr, codes)))
  for text in texts:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_has_its_special_tokens_and_size(tokenizer):
  assert tokenizer.token_to_id(corpus_text.END_OF_TEXT) == 0
  assert tokenizer.token_to_id(corpus_text.MASK) == 1
  assert tokenizer.get_vocab_size() <= 400
  assert tokenizer.encode("        value").tokens[0].startswith("ĠĠ")


def test_a_prompt_that_ends_at_a_line_end_is_a_prefix(tokenizer):
  for text in (MODULE, PROBLEM["prompt"] + PROBLEM["canonical_solution"]):
    cut = text.index('"""\n', text.index('"""', text.index("def ")) + 3) + 4
    head = tokenizer.encode(text[:cut]).ids
    assert tokenizer.encode(text).ids[: len(head)] == head


def test_encode_ends_each_document(tokenizer):
  documents = [Document("a", "x = 1\n"), Document("b", MODULE)]
  tokens = corpus.encode(tokenizer, documents, chunk=1)
  assert tokens.dtype == np.uint16
  parts = np.split(tokens, np.flatnonzero(tokens == 0) + 1)
  assert [tokenizer.decode(p[:-1]) for p in parts[:-1]] == [d.text for d in documents]
  assert parts[-1].size == 0


def test_cutting_keeps_whole_documents():
  tokens = np.array([5, 6, 0, 7, 0, 8, 9, 0], np.uint16)
  for limit, kept, count in ((8, 8, 3), (7, 5, 2), (5, 5, 2), (4, 3, 1), (2, 0, 0)):
    cut, documents = corpus.cut_at_document(tokens, limit)
    np.testing.assert_array_equal(cut, tokens[:kept])
    assert documents == count


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 1001])
def test_packing_returns_the_same_tokens(count):
  tokens = np.random.default_rng(count).integers(0, 4096, count).astype(np.uint16)
  packed = token_files.pack12(tokens)
  assert len(packed) == 8 + 3 * ((count + 1) // 2)
  np.testing.assert_array_equal(token_files.unpack12(packed), tokens)


def test_packing_refuses_what_does_not_fit():
  with pytest.raises(ValueError, match="4095"):
    token_files.pack12(np.array([4096], np.uint16))
  with pytest.raises(ValueError, match="announced"):
    token_files.unpack12(token_files.pack12(np.array([1, 2], np.uint16))[:-1])
  with pytest.raises(ValueError, match="count"):
    token_files.unpack12(b"abc")


@pytest.mark.parametrize("period", [1, 7])
def test_saved_tokens_load_from_each_form(tmp_path, period):
  rng = np.random.default_rng(period)
  tokens = np.repeat(rng.integers(0, 4096, 3001), period).astype(np.uint16)
  raw, small = token_files.save_tokens(tokens, tmp_path, "train")
  assert raw.name == "train.u16" and raw.stat().st_size == 2 * len(tokens)
  assert raw.read_bytes()[:2] == int(tokens[0]).to_bytes(2, "little")
  for path in (raw, small):
    loaded = token_files.load_tokens(path)
    assert loaded.dtype == np.uint16
    np.testing.assert_array_equal(loaded, tokens)
  for form in ("raw", "packed"):
    small.write_bytes(token_files.compress(tokens, form, preset=1))
    np.testing.assert_array_equal(token_files.load_tokens(small), tokens)


def test_damaged_token_files_are_refused(tmp_path):
  _, small = token_files.save_tokens(np.arange(999, dtype=np.uint16), tmp_path, "x")
  small.write_bytes(small.read_bytes()[:-20])
  with pytest.raises(ValueError, match="damaged"):
    token_files.load_tokens(small)
  odd = tmp_path / "odd.u16"
  odd.write_bytes(b"abc")
  with pytest.raises(ValueError, match="even"):
    token_files.load_tokens(odd)
  with pytest.raises(ValueError, match="must end in"):
    token_files.load_tokens(tmp_path / "x.bin")


def test_archives_are_read_in_order_without_metadata(tmp_path):
  path = tmp_path / "p-1-py3-none-any.whl"
  with zipfile.ZipFile(path, "w") as wheel:
    for name in ("p/b.py", "p/a.py", "p/x.so", "p-1.dist-info/top_level.txt"):
      wheel.writestr(name, name)
  assert list(corpus_sources.read_archive(path)) == [
    ("p/a.py", b"p/a.py"),
    ("p/b.py", b"p/b.py"),
  ]


def test_every_source_has_a_permissive_licence_and_one_entry():
  allowed = ("PSF", "BSD", "0BSD", "MIT", "Apache-2.0", "Zlib", "CC0-1.0")
  for source in corpus_sources.SOURCES:
    for part in source.licence.replace(" OR ", " AND ").split(" AND "):
      assert any(name in part for name in allowed), source
  names = [s.package for s in corpus_sources.SOURCES]
  assert len(names) == len(set(names))


def test_the_standard_library_is_read_without_its_tests():
  names = [name for name, _ in corpus_sources.read_stdlib()]
  assert "heapq.py" in names and "json/decoder.py" in names
  assert not [n for n in names if "/tests/" in n or n.startswith(("test/", "site-"))]


def test_the_prompts_that_ship_are_whole_and_hold_prompts_only():
  demo = corpus_sources.pathlib.Path(corpus.__file__).parents[1] / "demo"
  for name, count in (("humaneval", 164), ("gsm_symbolic", 64)):
    lines = (demo / f"{name}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == count
    assert len({row["id"] for row in rows}) == count
    assert all(set(row) == {"id", "prompt"} for row in rows)
  held_out = (demo / "heldout.txt").read_text("utf-8").splitlines()
  assert held_out == sorted(set(held_out))
  assert all(corpus_text.is_held_out(name) for name in held_out)
