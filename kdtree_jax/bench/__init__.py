"""Measurements that anyone can rerun: `kdtree-bench --suite=...`.

`acceptance` counts how many tokens a round commits, `exactness` compares
speculative with plain decoding bit for bit, `speed` times both on one device.
Each is a function over models and prompts that returns a report: plain values,
fit for JSON. `kdtree_jax.cli.bench` loads the demo pair, prints and draws.
"""
