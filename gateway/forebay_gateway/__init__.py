"""forebay's gateway."""
