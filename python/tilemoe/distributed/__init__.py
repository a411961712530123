"""Shard experts over ranks.

team.py and pull.py have the ranks and their communication, layer.py the layer, cost.py its time and
memory, and dtensor.py the parameters on a mesh.
"""
