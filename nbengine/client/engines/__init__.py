"""Engines on this machine: starting, finding, listing and ending them."""
