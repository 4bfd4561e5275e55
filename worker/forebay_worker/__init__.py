"""forebay's worker."""
