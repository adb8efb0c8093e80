"""`%%prompt` and `%prompts`: prompts that are kept under names, and the lines that ask with them."""
