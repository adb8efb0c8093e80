"""The dashboard as a widget: the messages that its script receives, and its requests."""
