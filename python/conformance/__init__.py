"""PyTorch's own distributed tests against a backend: gloo, lockstep, or lockstep in gloo's place.

The tests are in the torch wheel; this package runs them fast (ranks are forked from a server that has torch imported),
compares what passes, and writes docs/internals/conformance.md:

    python python/conformance run --backend gloo --backend lockstep --backend replace_gloo --output results.json
    python python/conformance compare results.json
    python python/conformance document results.json
"""
