"""Trains the universal mixed-domain adapter of a model by self-distillation."""
