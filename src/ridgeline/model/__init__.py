"""Models: found, loaded, refused, run."""
