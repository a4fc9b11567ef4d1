"""A slice of Kimi K2.6 that one GPU of 139 GiB holds, and a drafter of full size.

Full width, the leading dense layer and ten of the 60 sparse ones. There are no such
weights: `kdtree-bench --suite=slice` makes random ones. In memory, in GB: a sparse
layer 9.8 (routed experts in int4 9.51), the dense layer 1.0, embedding and head 4.7,
drafter 7.0; a context of 128k tokens takes 1.7 in the latent cache and 3.2 in the
drafter's. The suite holds each context twice.

`--config.model.num_hidden_layers` takes another number of layers; the drafter's taps
follow it, spread as those of the published drafter are.
"""

from __future__ import annotations

import dataclasses

from kdtree_jax.bench import kimi_k2_6
from kdtree_jax.training.config import Experiment

LAYERS = 11


def get_config() -> Experiment:
  """The configuration."""
  whole = kimi_k2_6.get_config()
  return dataclasses.replace(
    whole,
    model=dataclasses.replace(whole.model, num_hidden_layers=LAYERS),
    decode=dataclasses.replace(whole.decode, budget=16),
  )
