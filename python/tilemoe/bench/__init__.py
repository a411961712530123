"""Times the layer beside other implementations of it: `python -m tilemoe.bench`, docs/benchmarks.md.

Nothing but the peer that is TileMoE itself imports tilemoe, so that alone.py can run this folder
in an environment that has only the peer."""
