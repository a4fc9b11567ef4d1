"""The operations of a decode round, batched and jittable.

Each takes `implementation="auto" | "xla" | "cuda"`: "auto" picks what is built for
the platform, a name forces it. `kdtree_jax.reference` holds the same names in
numpy, for one sequence.
"""

from __future__ import annotations

from kdtree_jax.ops.accept_tree import accept_tree
from kdtree_jax.ops.ancestors import ancestors
from kdtree_jax.ops.best_token import best_token
from kdtree_jax.ops.build_tree import (
  build_tree,
  chain_tree,
  log_softmax_topk,
  tree_from_table,
)
from kdtree_jax.ops.compaction import compact
from kdtree_jax.ops.grouped_matmul import grouped_matmul
from kdtree_jax.ops.matmul import gated_matmul, head_matmul, matmul
from kdtree_jax.ops.matmul_chain import matmul_chain
from kdtree_jax.ops.norm import add_rms_norm, rms_norm
from kdtree_jax.ops.rope import RopeFrequencies, rope, rope_table
from kdtree_jax.ops.rope_rows import rope_keys, rope_queries
from kdtree_jax.ops.route import route
from kdtree_jax.ops.routed_experts import routed_experts
from kdtree_jax.ops.token_log_probs import token_log_probs
from kdtree_jax.ops.tree_attention import tree_attention

__all__ = [
  "RopeFrequencies",
  "accept_tree",
  "add_rms_norm",
  "ancestors",
  "best_token",
  "build_tree",
  "chain_tree",
  "compact",
  "gated_matmul",
  "grouped_matmul",
  "head_matmul",
  "log_softmax_topk",
  "matmul",
  "matmul_chain",
  "rms_norm",
  "rope",
  "rope_keys",
  "rope_queries",
  "rope_table",
  "route",
  "routed_experts",
  "token_log_probs",
  "tree_attention",
  "tree_from_table",
]
