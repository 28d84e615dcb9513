"""The record that a run leaves."""
