"""The followers of what an engine publishes about itself."""
