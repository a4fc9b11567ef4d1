"""Golden cases: inputs of the kernels' ops and what the reference makes of them.

Without JAX. `python -m kdtree_jax.checkpoint.golden` writes them to a file that the
C++ checker reads.
"""

from __future__ import annotations

import numpy as np

from kdtree_jax.reference.golden import (
  accept,
  attention,
  best_token,
  build,
  compaction,
  emit,
  matmul,
  norm,
  paths,
  rope,
  rope_keys,
  route,
  routed_experts,
  token_log_probs,
)
from kdtree_jax.reference.golden.case import GoldenCase, Rule

__all__ = ["GoldenCase", "Rule", "golden_cases"]

# New ones come last: the place of an op seeds its cases.
_MODULES = (
  rope,
  build,
  paths,
  attention,
  accept,
  compaction,
  rope_keys,
  best_token,
  token_log_probs,
  emit,
  norm,
  route,
  matmul,
  routed_experts,
)


def golden_cases(seed: int = 0, *, small: bool = False) -> list[GoldenCase]:
  """All cases of all ops.

  Args:
    seed: of the random inputs. Each op has its own stream, so that the cases of one
      do not depend on those of another.
    small: few and small ones, for runs under a sanitizer.

  Returns:
    The cases, in a fixed order.
  """
  made = []
  for index, module in enumerate(_MODULES):
    made += module.cases(np.random.default_rng([seed, index]), small=small)
  return made
