"""Nodes, graphs, and what runs and draws them."""
