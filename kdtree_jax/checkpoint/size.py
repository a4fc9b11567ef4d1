"""What a config may make a reader enumerate and allocate.

A config of some bytes can ask for any number of layers and for tables of any length.
Layers and experts have tensors, so files bound them; positions have none.
"""

from __future__ import annotations

from kdtree_jax._validation import check
from kdtree_jax.config import DrafterConfig, ModelConfig

# Eight times the context of Kimi K2.6, whose table of RoPE takes 64 MB.
MAX_POSITIONS = 1 << 21


def check_layers(layers: int, tensors: int, experts: int = 0) -> None:
  """Compares layers with the tensors that there are for them.

  Args:
    layers: of the model.
    tensors: of the files.
    experts: routed ones of all layers.

  Raises:
    ConfigError: there are too few.
  """
  check(
    max(layers, experts) <= tensors,
    "num_hidden_layers",
    layers,
    f"these layers and their experts need more tensors than the {tensors} there are",
  )


def check_size(config: ModelConfig | DrafterConfig, tensors: int) -> None:
  """Compares a config with the number of tensors of its files.

  Raises:
    ConfigError: it has more layers or experts, or too long a table of RoPE.
  """
  experts = 0
  if isinstance(config, ModelConfig):  # A drafter's table is as long as its cache.
    check(
      config.max_position_embeddings <= MAX_POSITIONS,
      "max_position_embeddings",
      config.max_position_embeddings,
      f"at most {MAX_POSITIONS} are supported",
    )
    moe_layers = max(0, config.num_hidden_layers - config.first_k_dense_replace)
    experts = moe_layers * config.n_routed_experts
  check_layers(config.num_hidden_layers, tensors, experts)
