// Exists so that the examples can share one precompiled header.
