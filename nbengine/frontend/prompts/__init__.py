"""Kept prompts: templates with variables, roles and examples, in versions, beside the runs that used them."""
