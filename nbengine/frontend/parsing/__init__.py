"""Answers: state machines that divide what a model writes into reasoning, content and calls of tools."""
