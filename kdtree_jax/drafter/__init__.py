"""Drafters: the interface, DFlash, and two that need no training."""
