"""The demo pair: a small trained target and its drafter, with held-out prompts.

`NOTICE.md` names the training material and its licences; `heldout.txt` the files
that were never trained on.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
  from tokenizers import Tokenizer

  from kdtree_jax.drafter.dflash import DFlash
  from kdtree_jax.model import Target


def load_demo(
  dtype: Literal["float32", "bfloat16"] = "float32",
  expert_dtype: Literal["as_stored", "int4", "dequantized"] = "dequantized",
) -> tuple[Target, DFlash, Tokenizer]:
  """Loads the pair that ships with the package.

  Args:
    dtype: see `kdtree_jax.load_checkpoint`.
    expert_dtype: too. The file has int4; "dequantized" holds the same values, which is
      faster on a CPU.

  Returns:
    (target, drafter, tokenizer). `tokenizer.encode(text).ids` gives token ids;
    texts start with the target's `bos_token_id`.
  """
  from tokenizers import Tokenizer

  from kdtree_jax.checkpoint import load_drafter, load_target, read_tokenizer_json

  folder = resources.files("kdtree_jax.demo")
  with (
    resources.as_file(folder / "target.kdtr") as target_path,
    resources.as_file(folder / "drafter.kdtr") as drafter_path,
  ):
    target = load_target(target_path, dtype, expert_dtype)
    drafter = load_drafter(drafter_path, dtype)
    tokenizer_json = read_tokenizer_json(target_path)
  assert tokenizer_json is not None, "the demo target carries its tokenizer"
  return target, drafter, Tokenizer.from_str(tokenizer_json)


def load_prompts(name: Literal["humaneval", "gsm_symbolic"]) -> list[dict[str, str]]:
  """Held-out prompts, each with `id` and `prompt`.

  Args:
    name: "humaneval" (164 problems, MIT) or "gsm_symbolic" (seeds that were not
      trained on).
  """
  text = resources.files("kdtree_jax.demo").joinpath(f"{name}.jsonl").read_text("utf-8")
  return [json.loads(line) for line in text.splitlines()]
