"""Runs in a notebook: their recording while prompts are asked, and what `%runs` shows and does with them."""
