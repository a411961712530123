"""Times the layer beside others of its kind: `python -m tilemoe.bench`, docs/benchmarks.md.

Nothing but the peer that is TileMoE itself imports tilemoe, so that alone.py can run this folder
in an environment that has only the peer."""
