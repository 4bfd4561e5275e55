"""Reasoning: telling a model's thinking from its answer."""
