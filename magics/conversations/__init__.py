"""`%%chat`: conversations and their history."""
