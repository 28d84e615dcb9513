"""Proximal policy optimization: trajectories are generated, judged, and learned from in several optimizer steps."""
