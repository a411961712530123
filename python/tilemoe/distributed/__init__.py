"""Experts spread over ranks: the ranks and what travels between them (team.py, pull.py), the layer
(layer.py), its time and memory (cost.py), and parameters on a mesh (dtensor.py)."""
