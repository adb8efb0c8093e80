"""What travels between processes, and how."""
