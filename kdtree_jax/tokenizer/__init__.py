"""Tokenizers as Hugging Face directories have them, with their chat templates."""

from __future__ import annotations

from kdtree_jax.tokenizer.load import load_tokenizer, read_stop_token_ids
from kdtree_jax.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "read_stop_token_ids"]
