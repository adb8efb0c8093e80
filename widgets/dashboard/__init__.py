"""The dashboard as a widget: what its script is told, and what it asks."""
