"""Measurements of Lockstep against its peers; run by scripts/bench."""
