"""A draft tree in the terminal."""

from __future__ import annotations

from collections.abc import Callable

from kdtree_jax.decoding.result import Round


def draw_round(record: Round, decode: Callable[[int], str]) -> str:
  """Draws one round's tree, a node a line, children indented below.

  Accepted nodes are marked with a filled circle. Behind each node stands the
  drafter's probability of its path.

  Args:
    record: the round.
    decode: text of a token id.
  """
  import math

  children: dict[int, list[int]] = {}
  for node in range(1, record.size):
    children.setdefault(int(record.parents[node]), []).append(node)
  accepted = set(record.path)
  lines: list[str] = []

  def visit(node: int, prefix: str, branch: str) -> None:
    mark = "●" if node in accepted else "○"
    text = repr(decode(int(record.token_ids[node])))[1:-1]
    probability = math.exp(float(record.log_probs[node]))
    lines.append(f"{prefix}{branch}{mark} {text}  {probability:.2f}")
    below = prefix + {"": "", "├─": "│ ", "└─": "  "}[branch]
    own = children.get(node, [])
    for i, child in enumerate(own):
      visit(child, below, "└─" if i == len(own) - 1 else "├─")

  visit(0, "", "")
  return "\n".join(lines)
