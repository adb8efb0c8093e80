"""Many settings or prompts at once, side by side."""
