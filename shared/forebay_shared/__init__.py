"""forebay's shared."""
