"""Drafters compared head to head on one model: measured beside plain decoding, and reported."""
