"""Tool calls: how each family of models writes them, and how they are read back from its text."""
