"""The golden definition of every algorithm: numpy only, one sequence, no JAX.

Written to be read. The names are those of the batched JAX forms; functions here
take one sequence, without the batch axis.
"""

from __future__ import annotations

from kdtree_jax.reference.attention import (
  absorb_query,
  causal_attention,
  expand_value,
  naive_attention,
  tree_attention,
)
from kdtree_jax.reference.decode import DecodeResult, decode
from kdtree_jax.reference.drafter import draft
from kdtree_jax.reference.int4 import dequantize_int4, pack_int4, unpack_int4
from kdtree_jax.reference.layers import (
  linear,
  log_softmax,
  rms_norm,
  softmax,
  swiglu,
)
from kdtree_jax.reference.model import (
  ForwardOutput,
  VerifyOutput,
  forward,
  init_cache,
  verify,
)
from kdtree_jax.reference.moe import (
  combine,
  grouped_matmul,
  moe,
  route,
  routed_experts,
)
from kdtree_jax.reference.random import gumbel_noise, random_bits, threefry2x32
from kdtree_jax.reference.rope import (
  RopeTable,
  inverse_frequencies,
  rope,
  rope_table,
  yarn_band,
)
from kdtree_jax.reference.sampling import choose, top_p_filter
from kdtree_jax.reference.tree import (
  Tree,
  accept_tree,
  ancestors,
  build_tree,
  compact,
  log_softmax_topk,
)
from kdtree_jax.reference.weights import (
  check_weights,
  drafter_weight_shapes,
  random_drafter_weights,
  random_weights,
  weight_shapes,
)

__all__ = [
  "DecodeResult",
  "ForwardOutput",
  "RopeTable",
  "Tree",
  "VerifyOutput",
  "absorb_query",
  "accept_tree",
  "ancestors",
  "build_tree",
  "causal_attention",
  "check_weights",
  "choose",
  "combine",
  "compact",
  "decode",
  "dequantize_int4",
  "draft",
  "drafter_weight_shapes",
  "expand_value",
  "forward",
  "grouped_matmul",
  "gumbel_noise",
  "init_cache",
  "inverse_frequencies",
  "linear",
  "log_softmax",
  "log_softmax_topk",
  "moe",
  "naive_attention",
  "pack_int4",
  "random_bits",
  "random_drafter_weights",
  "random_weights",
  "rms_norm",
  "rope",
  "rope_table",
  "route",
  "routed_experts",
  "softmax",
  "swiglu",
  "threefry2x32",
  "top_p_filter",
  "tree_attention",
  "unpack_int4",
  "verify",
  "weight_shapes",
  "yarn_band",
]
