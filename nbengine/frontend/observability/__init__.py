"""This package tells others what a frontend and its engine do: log lines, spans, and figures for monitoring."""
